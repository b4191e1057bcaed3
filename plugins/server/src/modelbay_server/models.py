"""The models of a server: which names there are, which of them are loaded, and who makes room for whom."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from modelbay.errors import ModelbayError, UsageError
from modelbay.resolve import Resolution
from modelbay_server.engine_loop import EngineLoop, Observer
from modelbay_server.errors import ApiError, ModelUnavailableError
from modelbay_server.settings import ModelSource
from modelbay_server.stats import EngineStats

logger = logging.getLogger("modelbay_server")


@dataclass
class ServedModel:
    """One model and the state it is in.

    Attributes:
        resolution: what will run; decided when the server starts, whether the model is loaded or not.
        bytes: what it takes when it is loaded; only asked where there is a limit.
        users: requests that hold it. used: when the last one let it go.
        loop: its engine, from the beginning of the load.
    """

    source: ModelSource
    resolution: Resolution
    kwargs: dict[str, Any]
    bytes: int = 0
    users: int = 0
    used: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))
    loop: EngineLoop | None = None

    @property
    def name(self) -> str:
        """The name in answers: the first of its names."""
        return self.source.names[0]

    @property
    def ready(self) -> bool:
        return self.loop is not None and self.loop.alive and self.loop.loaded.done()

    def open(self) -> Any:
        """Load it. Runs on the engine's thread."""
        from modelbay_runtime.llm import LLM

        return LLM(self.source.reference, **self.kwargs)


class ModelPool:
    """Models that are loaded when they are first asked for. Only the event loop may touch it, once it runs.

    Args:
        memory: most bytes of all loaded models together; None for no limit.
        observer: for each model's name.
    """

    def __init__(self, models: Sequence[ServedModel], memory: int | None, observer: Callable[[str], Observer]) -> None:
        self.models = tuple(models)
        self._memory = memory
        self._observer = observer
        self._changing = asyncio.Lock()
        self._closed = False
        #: Called when a model has been loaded, and when one has been unloaded.
        self.on_load: Callable[[], object] = lambda: None
        self.on_unload: Callable[[], object] = gc.collect

    def find(self, name: str | None) -> ServedModel:
        """The model that a request names; the first one if it names none.

        Raises:
            ApiError: 404, with the names there are.
        """
        for model in self.models:
            if name is None or name in model.source.names:
                return model
        known = ", ".join(repr(each) for model in self.models for each in model.source.names)
        asked = str(name)[:200]
        raise ApiError(
            404,
            f"the model {asked!r} does not exist; this server has {known}.",
            param="model",
            code="model_not_found",
        )

    def require(self, name: str | None, tasks: Sequence[str], what: str) -> ServedModel:
        """`find`, for a model that does one of these tasks.

        Raises:
            ApiError: 404 for a name that does not exist, 400 for a model that does something else.
        """
        model = self.find(name)
        if model.resolution.task not in tasks:
            raise ApiError(
                400,
                f"the model {model.name!r} is served for {model.resolution.task}; {what} needs one for "
                f"{' or '.join(tasks)}.",
                param="model",
                code="wrong_task",
            )
        return model

    @asynccontextmanager
    async def use(self, model: ServedModel) -> AsyncIterator[LoadedModel]:
        """The model, loaded, and kept so while the block runs.

        Raises:
            ModelUnavailableError: it could not be loaded, or there is no room among models that are in use.
        """
        model.users += 1
        try:
            yield LoadedModel(model, await self._loaded(model))
        finally:
            model.users -= 1
            model.used = time.monotonic()

    async def _loaded(self, model: ServedModel) -> EngineLoop:
        if model.ready:
            assert model.loop is not None
            return model.loop
        async with self._changing:  # one load at a time: each needs to know what the others take
            if self._closed:
                raise ModelUnavailableError("the server is shutting down.")
            if model.loop is None:
                await self._make_room(model)
                logger.info("loading %s", model.name)
                model.loop = EngineLoop(model.open, model.name, self._observer(model.name))
                model.loop.loaded.add_done_callback(self._has_loaded)
            loop = model.loop
            try:
                await asyncio.shield(loop.loaded)  # others may wait for the same load
            except ModelbayError as error:
                model.loop = None
                raise ModelUnavailableError(f"the model {model.name!r} could not be loaded: {error}") from error
            return loop

    def _has_loaded(self, loaded: asyncio.Future[Any]) -> None:
        """Whoever asked for the model may have gone meanwhile."""
        if not loaded.cancelled() and loaded.exception() is None:
            self.on_load()

    async def _make_room(self, wanted: ServedModel) -> None:
        if self._memory is None:
            return
        loaded = [model for model in self.models if model.loop is not None]
        taken = sum(model.bytes for model in loaded)
        idle = sorted((model for model in loaded if not model.users), key=lambda model: model.used)
        if taken - sum(model.bytes for model in idle) + wanted.bytes > self._memory:
            busy = ", ".join(repr(model.name) for model in loaded if model.users)
            raise ModelUnavailableError(f"there is no room for {wanted.name!r} while {busy} is in use.")
        while taken + wanted.bytes > self._memory:
            model = idle.pop(0)
            taken -= model.bytes
            await self._unload(model)

    async def _unload(self, model: ServedModel) -> None:
        loop, model.loop = model.loop, None
        if loop is not None:
            logger.info("unloading %s", model.name)
            await loop.close()
            self.on_unload()

    def snapshots(self) -> Iterator[tuple[str, EngineStats]]:
        for model in self.models:
            if model.ready and model.loop is not None:
                yield model.name, model.loop.stats

    def failures(self) -> dict[str, str]:
        """The models whose engines have died, each with the reason."""
        return {
            model.name: str(model.loop.failure)
            for model in self.models
            if model.loop is not None and model.loop.failure is not None
        }

    async def preload(self) -> None:
        """Load the first model, as a request for it would.

        Raises:
            ModelUnavailableError: it cannot be loaded.
        """
        async with self.use(self.models[0]):
            pass

    async def close(self, timeout: float) -> None:
        """Unload everything; what still loads or runs after ``timeout`` seconds is left behind."""
        self._closed = True
        loops = [model.loop for model in self.models if model.loop is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(loop.close() for loop in loops))


class LoadedModel:
    """A model that is in use: its `LLM` to look things up in, and its loop to submit to."""

    def __init__(self, served: ServedModel, loop: EngineLoop) -> None:
        self.served = served
        self.loop = loop
        self.llm = loop.loaded.result()

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    @property
    def vocab_size(self) -> int:
        return int(self.llm.resolution.config.vocab_size)


def resolve_models(sources: Sequence[ModelSource], memory: int | None) -> list[ServedModel]:
    """Decide what will run for each, without loading any; with a limit, also what each will take.

    Raises:
        ModelbayError: a model that cannot be resolved, or that does not fit the limit by itself.
    """
    from modelbay.resolve import resolve

    models = []
    for source in sources:
        resolution = resolve(source.reference, **source.kwargs)
        model = ServedModel(source, resolution, dict(source.kwargs))
        if memory is not None:
            _measure(model, memory)
        models.append(model)
    return models


def _measure(model: ServedModel, memory: int) -> None:
    """Weights by the module on meta; the cache as it is set, else a quarter of the limit, as far as there is room."""
    from modelbay_runtime.build import build_model

    weights = build_model(model.resolution).parameter_bytes()
    cache = model.kwargs.get("kv_cache_memory_bytes")
    if cache is None:
        cache = model.kwargs["kv_cache_memory_bytes"] = max(min(memory // 4, memory - weights), 1)
    model.bytes = weights + cache
    if model.bytes > memory:
        raise UsageError(
            f"{model.name!r} takes {weights:,} bytes of weights and {cache:,} of cache; --model-memory is {memory:,}."
        )
