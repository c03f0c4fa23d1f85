"""How fast chats become masked token ids, beside the tokenizer alone on the same text.

    python benchmarks/data.py

The bare rate is `tokenizers`' own `encode_batch` on the rendered text: what rendering, finding the spans and making
the masks cost comes on top. Conversations are made up from the repository's prompts, so nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from time import perf_counter

from eagle3_utils.corpus.generation.responses import read_prompts
from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.tokens import SpanTokenizer
from eagle3_utils.runs import resolve_path
from eagle3_utils.target import load_target, load_tokenizer

NUM_CONVERSATIONS, BATCH, REPEATS = 2000, 512, 3


def conversations() -> list[list[dict[str, str]]]:
    """Chats of one to four turns, of about 700 tokens."""
    prompts = read_prompts([resolve_path(f"data/prompts/{source}.jsonl") for source in ("maths", "code")], split=None)
    texts = [prompt["messages"][0]["content"] for prompt in prompts]
    chooser = random.Random(0)
    chats = []
    for _ in range(NUM_CONVERSATIONS):
        turns = []
        for _ in range(chooser.randint(1, 4)):
            turns.append({"role": "user", "content": chooser.choice(texts)})
            turns.append({"role": "assistant", "content": "\n\n".join(chooser.choices(texts, k=8))})
        chats.append(turns)
    return chats


def fastest(work) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    tokenizer = load_tokenizer(load_target("example"))
    chats = conversations()
    texts = [ChatRenderer(tokenizer).render(chat)[0] for chat in chats]
    batches = [slice(start, start + BATCH) for start in range(0, len(chats), BATCH)]
    counts: list[int] = []

    def bare() -> None:
        counts[:] = [len(e.ids) for b in batches for e in tokenizer.backend_tokenizer.encode_batch(texts[b])]

    def masked() -> None:
        renderer, encoder = ChatRenderer(tokenizer), SpanTokenizer(tokenizer)
        for batch in batches:
            rendered = [renderer.render(chat) for chat in chats[batch]]
            encoder.encode_batch([text for text, _ in rendered], [spans for _, spans in rendered])

    bare_seconds, masked_seconds = fastest(bare), fastest(masked)
    tokens = sum(counts)
    print(
        json.dumps(
            {
                "conversations": len(chats),
                "tokens": tokens,
                "bare_tokens_per_second": round(tokens / bare_seconds),
                "render_and_mask_tokens_per_second": round(tokens / masked_seconds),
                "share_of_bare": round(bare_seconds / masked_seconds, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
