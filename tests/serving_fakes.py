"""A stand-in for an SGLang server that captures: the HTTP surface and dump files of one, over a real small model."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3_utils.target import Target


class FakeSGLang:
    """Serves one causal LM on 127.0.0.1 in this process; faults are attributes a test sets.

    Parameters
    ----------
    boundaries : what `aux` holds. shift, pre_norm, lose, other_ids, noise : planted faults.
    """

    def __init__(self, model, target: Target, dump_dir: Path, boundaries: list[int]):
        self.model, self.target, self.dump_dir, self.boundaries = model, target, dump_dir, boundaries
        self.shift, self.pre_norm, self.lose, self.other_ids, self.noise = 0, False, False, False, 0.0
        self.model_path, self.status, self.max_bytes = str(target.path), 200, 1 << 30
        self.noisy_rids: str = ""
        self.cut_rids: str = ""  # those whose dump says that it came in two pieces
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeSGLang:
        self.write_handshake()
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()  # polls: a quick end
        return self

    def __exit__(self, *_exception) -> None:
        self._http.shutdown()
        self._http.server_close()

    def write_handshake(self, **changes) -> dict:
        facts = {
            "pid": os.getpid(), "nonce": "n", "sglang_version": "0.5.14", "capture_hash": "c",
            "model_path": self.model_path, "model_class": "LlamaForCausalLM", "num_layers": self.target.num_layers,
            "hidden_size": self.target.hidden_size, "boundaries": self.boundaries, "method": "model",
            "dtype": "float32", "model_dtype": "float32", "device": "cpu", "quantization": None,
            "kv_cache_dtype": "auto",
            "attention_backend": "torch_native", "chunked_prefill_size": 2048,
            "ranks": {"tp": 1, "attn_tp": 1, "writers": 1}, "max_bytes": self.max_bytes,
        }  # fmt: skip
        facts |= changes
        (self.dump_dir / "handshake.json").write_text(json.dumps(facts))
        return facts

    def generate(self, body: dict) -> tuple[int, dict]:
        ids = body["input_ids"]
        with self._lock, torch.inference_mode():
            last: list[torch.Tensor] = []  # what enters the final norm
            hook = self.model.model.norm.register_forward_pre_hook(lambda _norm, args: last.append(args[0][0]))
            output = self.model.model(torch.tensor([ids]), output_hidden_states=True)
            hook.remove()
            states = [state[0] for state in output.hidden_states]
            final = output.last_hidden_state[0]
            served = [[None, ids[0], None]]
            if body.get("return_logprob"):
                logprobs = torch.log_softmax(self.model.lm_head(final).float(), -1)
                served += [[float(logprobs[t, ids[t + 1]]), ids[t + 1], None] for t in range(len(ids) - 1)]
        rid = body.get("rid", "")
        if self.status != 200:
            return self.status, {"detail": "hidden states not captured: planted"}
        if rid.startswith("hs-") and not self.lose:
            self._dump(rid, ids, [*states[:-1], last[0]], final)
        return 200, {"text": "", "meta_info": {"id": rid, "input_token_logprobs": served}}

    def _dump(self, rid: str, ids: list[int], boundaries: list[torch.Tensor], final: torch.Tensor) -> None:
        aux = torch.stack([boundaries[b + self.shift] for b in self.boundaries], 1)
        if self.noise and self.noisy_rids in rid:
            aux = aux + self.noise * aux.abs().mean() * torch.randn_like(aux)
        tensors = {
            "input_ids": torch.tensor(ids if not self.other_ids else ids[::-1]),
            "aux": aux.contiguous(),
            "final": (boundaries[-1] if self.pre_norm else final).contiguous(),
        }
        if rid.startswith("hs-all-"):
            tensors["hidden"] = torch.stack(boundaries, 1)
        said = {"rid": rid, "num_tokens": str(len(ids)), "boundaries": json.dumps(self.boundaries), "nonce": "n"}
        said["pieces"] = json.dumps([3, len(ids) - 3] if self.cut_rids and self.cut_rids in rid else [len(ids)])
        save_file(tensors, self.dump_dir / f"{rid}.part", said)
        os.rename(self.dump_dir / f"{rid}.part", self.dump_dir / f"{rid}.safetensors")

    def _handler(fake):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args) -> None:
                return

            def answer(self, status: int, body: dict) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.answer(200, {"model_path": fake.model_path} if self.path == "/model_info" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(*fake.generate(body))

        return Handler
