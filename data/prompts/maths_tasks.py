"""Maths tasks as a chat user would write them: word problems, arithmetic, number theory, algebra, time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_ASIDES = ["", "", " Please explain each step.", " Show your work.", " How do you get there?", " Explain it simply."]
# Dataset → (share, openings). The opening stands before the bare task.
_BARE = {
    "chain_sum": (0.07, ["What is", "Can you compute", "Help me add this up:", "Calculate"]),
    "basic_arithmetic": (0.08, ["What do I get for", "Work out", "Evaluate", "Quick question: what is"]),
    "simple_equations": (0.08, ["Solve for {letter}:", "Find {letter} if", "I need {letter} from this equation:"]),
    "gcd": (0.06, ["What is the greatest common divisor of", "Find the GCD of"]),
    "lcm": (0.06, ["What is the least common multiple of", "Find the LCM of"]),
    "fraction_simplification": (0.06, ["Simplify the fraction", "Reduce to lowest terms:"]),
    "prime_factorization": (0.06, ["What are the prime factors of", "Factor this number into primes:"]),
    "calendar_arithmetic": (0.06, [""]),
    "coin_flip": (0.03, [""]),
}  # the rest: gsm_symbolic
_TAILS = re.compile(r"( (Give|Reply|Answer|Respond|Return|Write|Only)\b[^?]*| \(Example.*| Do not include units\.)$")


def maths_prompts(num: int, seed: int, usable: Callable[[str], bool] = lambda text: True) -> list[str]:
    """`num` different tasks, in mixed order, the same for the same seed.

    usable : which texts may be taken. What a kind lacks of its share (some have few different tasks) is filled up with
        word problems.
    """
    import reasoning_gym  # here, because it is not in requirements.lock and the other sources do without

    chooser = random.Random(seed)
    counts = {name: round(share * num) for name, (share, _) in _BARE.items()}
    counts["gsm_symbolic"] = num - sum(counts.values())
    prompts: list[str] = []
    for name in [*_BARE, "gsm_symbolic"]:
        count = counts[name]
        kept: dict[str, None] = {}
        for entry in reasoning_gym.create_dataset(name, seed=seed, size=20 * count):
            text = _phrase(name, entry, chooser)
            if text is not None and len(text) <= 600 and usable(text):
                kept[text] = None
            if len(kept) == count:
                break
        if name == "gsm_symbolic" and len(kept) < count:
            raise SystemExit(f"{name}: only {len(kept)} of {count} different tasks")
        counts["gsm_symbolic"] += count - len(kept)
        prompts += kept
    chooser.shuffle(prompts)
    return prompts


def _phrase(name: str, entry: dict, chooser: random.Random) -> str | None:
    question = " ".join(entry["question"].split())
    aside = chooser.choice(_ASIDES)
    if name == "gsm_symbolic":
        return question.removesuffix(" Give the result as your final answer. Do not include units.") + aside
    _, openings = _BARE[name]
    opening = chooser.choice(openings)
    if not opening:
        return _TAILS.sub("", question) + aside
    task = _bare_task(name, question)
    if task is None:
        return None
    letter = next((character for character in task if character.isalpha()), "x")
    return (
        f"{opening.format(letter=letter)} {task}{'?' if opening.startswith(('What', 'Can', 'Quick')) else '.'}{aside}"
    )


def _bare_task(name: str, question: str) -> str | None:
    """The numbers or the expression alone, without the data set's own instructions."""
    if name in ("gcd", "lcm"):
        numbers = re.search(r": (\d+(?:, \d+)+)", question)
        return " and ".join(numbers[1].rsplit(", ", 1)) if numbers else None
    if name == "fraction_simplification":
        fraction = re.search(r"\d+/\d+", question)
        return fraction[0] if fraction else None
    if name == "prime_factorization":
        return re.search(r"of (\d+)", question)[1]
    expression = re.search(r"(?::|Calculate|Evaluate|Compute|of) ([^:]*[\d)a-z])\s*(?:=|\.|\?)?\s*$", question)
    return expression[1].strip() if expression else None
