"""A plain HTTP client for the serve tests: JSON in and out, streams as lists of events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Client:
    url: str

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=TIMEOUT_S)

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            self.url + path,
            content=content,
            headers={"content-type": "application/json", **headers},
            timeout=TIMEOUT_S,
        )

    def complete(self, model: str, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions; raises on any other status than 200."""
        response = self.post("/v1/completions", {"model": model, "prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, model: str, text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        response = self.post("/v1/chat/completions", {"model": model, "messages": messages, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream that ends with [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]
