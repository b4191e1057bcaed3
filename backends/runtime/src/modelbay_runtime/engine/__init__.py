"""The engine: cache, scheduler, runner, sampler, outputs."""
