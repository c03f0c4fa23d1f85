"""A local endpoint that answers by both protocols and fails as it is told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint(ThreadingHTTPServer):
    """A local endpoint that answers by both protocols; `script` holds (status, headers) to answer first."""

    daemon_threads = True

    def __init__(self, tokenizer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokenizer, self.script, self.seen, self.headers = tokenizer, [], [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, body: dict) -> dict:
        stop = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        if path == "/generate":
            asked = self.tokenizer.decode(body["input_ids"])
            words = asked.rsplit("user\n", 1)[-1].split("<|im_end|>")[0].upper()
            ids = [*self.tokenizer.encode(words), stop]
            meta = {"finish_reason": {"type": "stop", "matched": stop}, "prompt_tokens": len(body["input_ids"])}
            return {"text": words, "output_ids": ids, "meta_info": meta | {"completion_tokens": len(ids)}}
        words = body["messages"][-1]["content"].upper()
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "cost": 0.25}
        return {"choices": [{"message": {"content": words}, "finish_reason": "stop"}], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, body))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        status, headers = self.server.script.pop(0) if self.server.script else (200, {})
        key = self.headers.get("authorization", "").removeprefix("Bearer ")  # some servers repeat it
        answer = self.server.answer(self.path, body) if status == 200 else {"error": f"no such key: {key}"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
