"""Names that vLLM has and that mean nothing here: what code written for it is told instead of "unknown"."""

from __future__ import annotations

from collections.abc import Mapping

from modelbay.errors import UsageError

_LORA = (
    "LoRA adapters are not served by this version.",
    "Merge the adapter into the weights (PEFT's merge_and_unload).",
)
_ADAPTERS = ("prompt adapters are not served by this version.", None)
_SPECULATION = (
    "a draft is not named by an argument of its own.",
    "Use speculative_config={'method': 'mtp'}, where the model has a layer for it.",
)
_GRAPHS = ("there is no choice between ways to compile or to capture.", "Use enforce_eager=True to have neither.")
_LOGS = ("the engine writes no statistics.", "See /metrics of `modelbay serve`, and the metrics of each output.")
_PREEMPTED = ("a request that is preempted is computed again; nothing is swapped out.", "Leave it out.")
_ROPE = ("it is a fact of the config.", "Use hf_overrides={'rope_parameters': {…}}.")
_PRIORITY = ("requests are served in the order of their arrival.", "Leave it out.")
_GRAMMAR = ("structured outputs have one implementation, llguidance.", "Leave it out.")
_ALWAYS = ("it is not a choice here.", "Leave it out.")
_CACHE_DTYPE = ("the KV cache is kept in the model's dtype; a quantised cache is not served by this version.", None)

#: Engine argument -> why there is none, and what to do.
ENGINE_ARGUMENTS: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules", "lora_dtype", "lora_path",
         "fully_sharded_loras", "lora_extra_vocab_size", "default_mm_loras", "lora_request"), _LORA),
    **dict.fromkeys(("enable_prompt_adapter", "max_prompt_adapters", "max_prompt_adapter_token"), _ADAPTERS),
    **dict.fromkeys(
        ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min",
         "speculative_draft_tensor_parallel_size"), _SPECULATION),
    **dict.fromkeys(
        ("compilation_config", "cuda_graph_sizes", "max_seq_len_to_capture", "max_context_len_to_capture"), _GRAPHS),
    **dict.fromkeys(("disable_log_stats", "disable_log_requests", "collect_detailed_traces"), _LOGS),
    **dict.fromkeys(("swap_space", "preemption_mode"), _PREEMPTED),
    **dict.fromkeys(("rope_scaling", "rope_theta"), _ROPE),
    **dict.fromkeys(("scheduling_policy", "priority"), _PRIORITY),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config"), _GRAMMAR),
    **dict.fromkeys(
        ("use_v2_block_manager", "num_lookahead_slots", "async_scheduling", "disable_custom_all_reduce",
         "disable_cascade_attn", "use_tqdm_on_load"), _ALWAYS),
    **dict.fromkeys(("kv_cache_dtype", "calculate_kv_scales", "quantization_param_path"), _CACHE_DTYPE),
    "cpu_offload_gb": ("weights are not moved between devices while a model runs.", "Leave it out."),
    "disable_sliding_window": ("a window is a fact of the model.", "Leave it out."),
    "decode_context_parallel_size": ("a sequence is not divided over ranks.", "Use tensor_parallel_size."),
    "enable_eplb": ("experts stay on the ranks that they were placed on.", "Leave it out."),
    "enable_sleep_mode": ("a model cannot sleep.", "Close it, and load it again."),
    "kv_transfer_config": ("the KV cache is not moved between engines.", None),
    "logits_processors": ("code does not take part in sampling.", "Use logit_bias or bad_words of SamplingParams."),
    "mm_processor_kwargs": ("the model's processor is used as its files configure it.", "Change its config file."),
    "worker_cls": ("ranks have one kind of worker.", "Leave it out."),
    # What has another name here.
    "task": ("the task has two parts here.", "Use runner='pooling', with convert='embed' or 'classify'."),
    "download_dir": ("downloads go to the cache of Hugging Face.", "Set HF_HOME."),
    "hf_token": ("the token is never an argument.", "Set HF_TOKEN."),
    "override_pooler_config": ("it has another name.", "Use pooler_config."),
    "override_generation_config": ("requests say how they are sampled.", "Use SamplingParams, or generation_config."),
    "mm_processor_cache_gb": ("it has another name.", "Use media_cache_bytes, in bytes."),
    "num_gpu_blocks_override": ("the cache is sized in bytes.", "Use kv_cache_memory_bytes."),
    "worker_use_ray": ("it has another name.", "Use distributed_executor_backend='ray'."),
    "served_model_name": ("an engine has no name.", "Use --served-model-name of `modelbay serve`."),
}  # fmt: skip

#: The same of `SamplingParams`.
SAMPLING_PARAMETERS: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(("lora_request", "lora_name"), _LORA),
    "prompt_adapter_request": _ADAPTERS,
    "guided_decoding": ("it has another name.", "Use structured_outputs."),
    "response_format": ("it is a parameter of the server's requests.", "Use structured_outputs={'json': schema}."),
    "best_of": ("as many sequences as are returned are made.", "Use n, and choose by cumulative_logprob."),
    **dict.fromkeys(
        ("use_beam_search", "beam_width", "length_penalty", "early_stopping"),
        ("beam search is not served by this version.", None),
    ),
    "logits_processors": ENGINE_ARGUMENTS["logits_processors"],
    "allowed_token_ids": (
        "there is no list of the only tokens.",
        "Use structured_outputs={'choice': […]}, if that says it.",
    ),
    "output_kind": ("outputs come whole, or from `stream`.", "Leave it out."),
    "priority": _PRIORITY,
}


def refuse_known(what: str, name: str, table: Mapping[str, tuple[str, str | None]]) -> None:
    """Refuse with the reason why there is no ``name``, if that is known.

    Args:
        what: what kind of name it is, as the message begins.

    Raises:
        UsageError: it is in the table.
    """
    if name in table:
        reason, hint = table[name]
        raise UsageError(f"{what} {name!r}: {reason}", hint=hint)


def why_unserved(option: str) -> str | None:
    """The same of an option of the command line (``--enable-lora``); None if nothing is known of it."""
    found = ENGINE_ARGUMENTS.get(option.lstrip("-").replace("-", "_"))
    return None if found is None else f"option {option}: {' '.join(filter(None, found))}"
