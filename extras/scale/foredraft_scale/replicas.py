"""Replicas of the server on Ray Serve, behind one gateway."""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foredraft.core.errors import ModelError
from foredraft.engine.generator import Generator
from foredraft.serve.inprocess import AsgiRequest, InProcess
from foredraft.serve.logs import log_to_stderr
from foredraft.serve.options import ServeOptions
from foredraft_scale.affinity import Affinity
from foredraft_scale.cluster import has_gpus
from foredraft_scale.gateway import Gateway, Message, ReplicaLost
from foredraft_scale.options import ScaleOptions

APP = "foredraft"
_LOST = (RayActorError, TaskCancelledError, DeploymentUnavailableError)
_LOGS = {"enable_access_log": False, "log_level": "WARNING"}
_UNBOUNDED = 10**6
"""Requests at once: replicas refuse what is too much for them, with a status of their own."""


class Replica:
    """One server without a port of its own."""

    async def __init__(self, load: Callable[[], Generator], names: Seq[str], options: ServeOptions) -> None:
        self._server: InProcess | None = None
        log_to_stderr()
        self._server = InProcess(load(), names, options)
        await self._server.start()

    async def answer(self, call: AsgiRequest, blocks: tuple[bytes, ...]) -> AsyncGenerator[Message, None]:
        """The ASGI messages of an answer; the blocks are for the router."""
        async for message in self._running.answer(call):
            yield message

    async def whole(self, call: AsgiRequest) -> tuple[str, list[Message]]:
        """This replica's name, and all messages of an answer."""
        return serve.get_replica_context().replica_id.unique_id, [each async for each in self._running.answer(call)]

    async def check_health(self) -> None:
        """Ray Serve calls this at intervals, and replaces a replica where it fails.

        Raises:
            ModelError: requests are open, but none moves.
        """
        if not self._running.healthy:
            raise ModelError("The server makes no progress.")

    @property
    def _running(self) -> InProcess:
        assert self._server is not None
        return self._server

    async def __del__(self) -> None:
        if self._server is not None:
            await self._server.stop()


class PrefixRouter(RequestRouter):
    """Ranks replicas by ``Affinity``. The load of a replica is its queue as Ray Serve last knew it."""

    def initialize_state(self, **options: Any) -> None:
        self._affinity = Affinity(**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, best first; the next one is asked if one's queue is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else full queues are asked without a pause
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in replicas.items()}
        return [[replicas[name]] for name in self._affinity.ranked(_blocks(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        names = {each.unique_id for each in self.curr_replicas}
        self._affinity.routed(_blocks(pending_request), replica_id.unique_id, names)


def _blocks(request: PendingRequest) -> tuple[bytes, ...]:
    return request.args[1] if len(request.args) > 1 else ()


class HandleReplicas:
    """Replicas behind a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._stream = handle.options(method_name="answer", stream=True)

    async def answer(self, call: AsgiRequest, blocks: tuple[bytes, ...]) -> AsyncGenerator[Message, None]:
        response = cast(DeploymentResponseGenerator, self._stream.remote(call, blocks))
        try:
            async for message in response:
                yield message
        except _LOST as error:
            raise ReplicaLost from error
        finally:
            response.cancel()

    async def all_replicas(self, call: AsgiRequest) -> Mapping[str, Seq[Message]]:
        try:
            found = await self._handle.broadcast("whole", call).results_async(timeout_s=10, return_exceptions=True)
        except (*_LOST, TimeoutError):
            return {}
        return dict(each for each in found if not isinstance(each, BaseException))


@serve.ingress()
class Ingress:
    """The deployment that Ray Serve's proxies send requests to."""

    def __init__(self, handle: DeploymentHandle, options: ServeOptions) -> None:
        self._gateway = Gateway(HandleReplicas(handle), options)

    def __serve_build_asgi_app__(self) -> Gateway:
        return self._gateway


def deploy(load: Callable[[], Generator], names: Seq[str], server: ServeOptions, scale: ScaleOptions) -> str:
    """Start the replicas, or replace those that run, a few at a time; return the endpoint's address when all are new.

    A replica that is replaced ends its requests first, for ``drain_seconds`` at most. The cluster must be connected.

    Args:
        load: makes a generator, in each replica.
        names: of the model in the API; the first one is in the answers.

    Raises:
        ModelError: the replicas do not start; the message has the reason.
    """
    keyed = replace(server, api_key=server.keys)  # the environment is not that of the replicas
    serve.start(http_options=HTTPOptions(host=server.host, port=server.port), logging_config=_LOGS)
    common: dict[str, Any] = {
        "max_ongoing_requests": _UNBOUNDED,
        "graceful_shutdown_timeout_s": server.drain_seconds,
        "max_constructor_retry_count": 3,
    }
    replicas = serve.deployment(
        name="replica",
        **({"autoscaling_config": dict(scale.autoscaling)} if scale.autoscaling else {"num_replicas": scale.replicas}),
        ray_actor_options={**({"num_gpus": 1} if has_gpus() else {}), **scale.actor},
        max_surge_percent=scale.max_surge_percent,
        request_router_config=_router(scale),
        **common,
    )(Replica)
    gateway = serve.deployment(
        name="gateway", num_replicas=scale.gateways, ray_actor_options={"num_cpus": 0}, max_surge_percent=100, **common
    )(Ingress)
    try:
        serve.run(gateway.bind(replicas.bind(load, tuple(names), keyed), keyed), name=APP, logging_config=_LOGS)
    except RuntimeError as error:
        raise ModelError(f"The replicas do not start: {_reason(error)}") from error
    return f"http://{server.host}:{server.port}"


def stop(seconds: float) -> None:
    """Refuse new requests, and wait until the accepted ones have ended, or for so long."""
    deadline = time.monotonic() + seconds
    while APP in serve.status().applications and time.monotonic() < deadline:
        with suppress(TimeoutError):  # after a minute
            serve.delete(APP)


def _router(scale: ScaleOptions) -> RequestRouterConfig:
    """Prefix affinity, or Ray Serve's own choice: the less busy of two at random."""
    if not scale.affinity:
        return RequestRouterConfig()
    name = f"{PrefixRouter.__module__}.{PrefixRouter.__qualname__}"
    return RequestRouterConfig(request_router_class=name, request_router_kwargs={"load_bound": scale.load_bound})  # type: ignore[arg-type]


def _reason(error: RuntimeError) -> str:
    """The last exception in Ray's report of a deployment that failed."""
    application = serve.status().applications.get(APP)
    report = application.deployments["replica"].message if application is not None else ""
    found = [line for line in report.splitlines() if "Error: " in line]
    return found[-1].partition("Error: ")[2].strip() if found else str(error)
