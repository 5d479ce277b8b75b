"""The HTTP surface (FastAPI) and its Ray Serve deployment. No model code here."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from serving.config import ServingConfig
from serving.fleet import ServedModel, load_service
from serving.metrics import CONTENT_TYPE
from serving.schema import REQUEST_ID, ErrorResponse, RankRequest, RankResponse, Refusal
from serving.service import RankService

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger("serving")
_REFS = "#/components/schemas/{model}"
_ERRORS: dict[int | str, dict[str, Any]] = {
    413: {"model": ErrorResponse, "description": "The body is larger than allowed; `limit` is in bytes."},
    422: {"model": ErrorResponse, "description": "The request is wrong; `detail` names the fields."},
    503: {"model": ErrorResponse, "description": "No champion for this surface, or overloaded: try again later."},
}


def build_app(service: RankService) -> FastAPI:
    """The ASGI application over a ready service. Needs no Ray."""
    app = FastAPI(title="Ad ranking", version="1", description="Ranks candidate ads by expected value.")
    limit = service.config.max_body_bytes

    @app.post("/v1/rank", response_model=RankResponse, responses=_ERRORS, openapi_extra=_body_schema())
    async def rank(request: Request) -> Response:
        """Rank candidate ads for one user on one surface."""
        request_id = _request_id(request)
        try:
            body = await read_body(request, limit)
            return _json(200, await service.rank(body, request_id))
        except Refusal as e:
            return _refuse(e, request_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            internal = Refusal(500, "internal", [("", "the model failed on this request; see the server's log")])
            return _refuse(internal, request_id)

    @app.get("/healthz")
    async def healthz() -> Response:
        """200 if every champion scores a fixed request as it did at start, else 503."""
        ok, report = await service.health()
        return _json(200 if ok else 503, report)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit` bytes. Raises Refusal (413) before anything is parsed."""
    declared = request.headers.get("content-length", "")
    message = f"the body may have at most {limit} bytes"
    if declared.isdigit() and int(declared) > limit:
        raise Refusal(413, "body_too_large", [("body", f"{message}, got {declared}")], limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Refusal(413, "body_too_large", [("body", f"{message}, got more")], limit)
        chunks.append(chunk)
    return b"".join(chunks)


class RankReplica:
    """One Ray Serve replica: loads the given bundles by hash, then answers. Holds no registry connection."""

    def __init__(self, config: ServingConfig, models: Sequence[ServedModel]) -> None:
        from ray import serve

        tag = serve.get_replica_context().replica_id.unique_id
        self.service = load_service(config, models, replica=str(tag))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve once the replica is constructed."""
        return build_app(self.service)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises or hangs: a blocked loop or a stuck model counts as dead."""
        ok, report = await self.service.health()
        if not ok:
            raise RuntimeError("; ".join(report["problems"]))

    def __del__(self) -> None:
        if hasattr(self, "service"):
            self.service.close()


def serve_application(config: ServingConfig, models: Sequence[ServedModel], env: Mapping[str, str]) -> Application:
    """The Serve application: `num_replicas` replicas, bounded queues, 503 with Retry-After beyond them."""
    from ray import serve
    from ray.serve.config import BackpressureConfig

    deployment = serve.deployment(
        serve.ingress()(RankReplica),
        name="rank",
        num_replicas=config.num_replicas,
        ray_actor_options={"num_cpus": config.replica_cpus, "runtime_env": {"env_vars": dict(env)}},
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=config.retry_after_s),
        health_check_period_s=10,
        health_check_timeout_s=2 * config.health_timeout_s,
        graceful_shutdown_timeout_s=config.request_timeout_s,
        max_constructor_retry_count=1,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return deployment.bind(config, list(models))


def _request_id(request: Request) -> str:
    """The caller's X-Request-ID (Ray Serve's proxy makes one and returns it as a header), else a new id."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _refuse(refusal: Refusal, request_id: str) -> Response:
    detail = [{"field": field, "message": message} for field, message in refusal.problems]
    content = {"error": refusal.code, "request_id": request_id, "detail": detail, "limit": refusal.limit}
    return _json(refusal.status, content, {"Retry-After": "30"} if refusal.status == 503 else {})


def _json(status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status, dict(headers or {}), media_type="application/json")


def _body_schema() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFS.format(model="RankRequest")}}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema plus the request model: the body is read by hand (limits before parsing)."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        request = RankRequest.model_json_schema(ref_template=_REFS)
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts |= request.pop("$defs", {})
        parts["RankRequest"] = request
        app.openapi_schema = schema
    return app.openapi_schema
