"""Every error KVRelay raises on purpose, in one tree; each knows the HTTP answer it becomes.

    KVRelayError
    |- RequestError                  the client's fault (4xx)
    |  |- InvalidRequest             400  bad JSON, wrong type, out-of-range value; names `param`
    |  |- UnsupportedFeature         400  a field that would change the answer and that we do not do
    |  |- ContextLengthExceeded      400  prompt + max_tokens beyond the context
    |  |- AuthenticationFailed       401  missing or wrong key
    |  |- NotFound                   404  unknown path
    |  |- ModelNotFound              404  unknown model
    |  |- MethodNotAllowed           405  a known path, the wrong verb
    |  |- BodyTimeout                408  the body did not come in time
    |  |- BodyTooLarge               413  body over the limit
    |  `- HeadersTooLarge            431  too many headers, or too long ones
    |- Overloaded                    429  the deadline cannot be met, or too much in flight; Retry-After
    |  `- Overcrowded                     a body that comes slowly made room for others
    |- Unavailable                   503  no path can answer; Retry-After
    |  |- NoWorker                        no worker of the pool is linked
    |  |- WorkerLost                      the link to the worker of an attempt broke
    |  |- Stopping                        this frontend stops: it takes nothing new, or ends what is left
    |  `- DeadlineExceeded                a stage's deadline passed (queue, prefill, transfer, ...)
    |- EngineFailure                 500  the engine failed this request
    |- ConfigError                        a setting is wrong: key, value, what is allowed
    |- StartError                         something the start needs is missing: one line says what
    |- LinkError                          a link's peer misbehaved or is gone
    |  |- HandshakeRefused                wrong key, wire version or malformed hello
    |  `- FrameRefused                    frame too long, or bytes that are no message
    `- TransferError                      KV could not be moved
       |- LayoutMismatch                  the two pools are shaped differently
       |- LeaseRefused                    the owner no longer vouches for the blocks
       |- PeerGone                        the peer's agent vanished
       `- TransferTimeout                 the read outlived its deadline

`error_body` is the only place that builds error JSON.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthenticationFailed",
    "BodyTimeout",
    "BodyTooLarge",
    "ConfigError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EngineFailure",
    "FrameRefused",
    "HandshakeRefused",
    "HeadersTooLarge",
    "InvalidRequest",
    "KVRelayError",
    "LayoutMismatch",
    "LeaseRefused",
    "LinkError",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoWorker",
    "NotFound",
    "Overcrowded",
    "Overloaded",
    "PeerGone",
    "RequestError",
    "StartError",
    "Stopping",
    "TransferError",
    "TransferTimeout",
    "Unavailable",
    "UnsupportedFeature",
    "WorkerLost",
    "error_body",
]


class KVRelayError(Exception):
    """Root of the tree.

    Attributes:
        status: HTTP status this error becomes before a stream began.
        type: the OpenAI error `type`.
        code: the OpenAI error `code`, or None.
        param: the request field at fault, or None.
        retry_after_s: value of Retry-After, or None when a retry cannot help.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(KVRelayError):
    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    pass


class UnsupportedFeature(RequestError):
    code = "unsupported_feature"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class AuthenticationFailed(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    status = 405


class BodyTimeout(RequestError):
    status = 408
    code = "body_timeout"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class Overloaded(KVRelayError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Overcrowded(Overloaded):
    pass


class Unavailable(KVRelayError):
    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class NoWorker(Unavailable):
    code = "no_worker"


class WorkerLost(Unavailable):
    code = "worker_lost"


class Stopping(Unavailable):
    code = "stopping"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class EngineFailure(KVRelayError):
    code = "engine_failure"


class ConfigError(KVRelayError):
    pass


class StartError(KVRelayError):
    pass


class LinkError(KVRelayError):
    pass


class HandshakeRefused(LinkError):
    pass


class FrameRefused(LinkError):
    pass


class TransferError(KVRelayError):
    pass


class LayoutMismatch(TransferError):
    pass


class LeaseRefused(TransferError):
    pass


class PeerGone(TransferError):
    pass


class TransferTimeout(TransferError):
    pass


def error_body(error: KVRelayError) -> dict[str, dict[str, str | None]]:
    """The OpenAI error object of `error`: `{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
