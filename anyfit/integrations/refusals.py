"""What transformers' Trainer can be asked for and anyfit does not do: each refused by name before training, with what to type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of TrainingArguments: the values that leave an option out, and what to do instead of any other.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed": ((None,), "leave it out: the plan offloads and shards as the machine needs"),
    "fsdp": ((None, "", False, []), "leave it out: the plan shards as the machine needs"),
    "fp16": ((False,), "use bf16=True (bf16 weights with exact fp32 masters), or neither for fp32"),
    "fp16_full_eval": ((False,), "leave it out: evaluation is in the precision of training"),
    "bf16_full_eval": ((False,), "leave it out: evaluation is in the precision of training"),
    "torch_compile": ((False, None), "leave it out: the numbers are those of the Trainer without it"),
    "auto_find_batch_size": ((False,), "leave it out: the plan cuts a batch that does not fit, with the same result"),
    "use_liger_kernel": ((False,), "leave it out: its kernels are not known to give the same numbers"),
    "torch_empty_cache_steps": ((None,), "leave it out: memory is taken once, as planned"),
    "optim_target_modules": ((None,), "leave it out: it belongs to optimizers that anyfit does not take"),
    "parallelism_config": ((None,), "leave it out: the plan divides the work over ranks"),
    "debug": (((), [], "", None), "leave it out: its hooks read weights and gradients that are not there all at once"),
    "ddp_find_unused_parameters": ((None,), "leave it out: there is no DDP"),
    "ddp_bucket_cap_mb": ((None,), "leave it out: there is no DDP"),
    "ddp_broadcast_buffers": ((None,), "leave it out: there is no DDP"),
    "ddp_static_graph": ((None,), "leave it out: there is no DDP"),
    "activation_offloading": ((False, None), "leave it out: the plan offloads activations where that pays"),  # of TRL
}
# Of `optim`; those that torch has. Any optimizer that treats each parameter by itself may be given as a class.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


def refuse_arguments(args: Any) -> None:
    """Raises for the first of the TrainingArguments that cannot be honoured."""
    for name, (unset, instead) in REFUSED.items():
        value = getattr(args, name, None)
        if not any(value == each for each in unset):
            raise ValueError(f"{type(args).__name__}({name}={value!r}) cannot be honoured with anyfit; {instead}")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in OPTIMIZERS:
        raise ValueError(
            f"{type(args).__name__}(optim={optim!r}) is not known to train the same with anyfit; these are: "
            f"{', '.join(OPTIMIZERS)}; another class of optimizer: optimizer_cls_and_kwargs=(class, options)"
        )
    config = args.accelerator_config
    if config.split_batches:
        raise ValueError(
            "accelerator_config={'split_batches': True} cannot be honoured with anyfit; leave it out, and give "
            "per_device_train_batch_size as what each rank has"
        )
    if args.world_size > 1 and not config.even_batches:
        raise ValueError(
            "accelerator_config={'even_batches': False} cannot be honoured with anyfit, whose ranks make every step together; "
            "leave it out"
        )


def refuse_devices(args: Any, has_gpu: bool) -> None:
    if args.use_cpu and has_gpu:
        raise ValueError("use_cpu=True, and anyfit plans for the GPU that is there; hide it: CUDA_VISIBLE_DEVICES= python ...")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs and one process; start a process for each: anyfit fit --gpus {args.n_gpu} your_script.py, or "
            f"torchrun --nproc-per-node {args.n_gpu} your_script.py"
        )


def refuse_model(model: Any, *, bf16: bool) -> None:
    if getattr(model, "hf_device_map", None) is not None:
        raise ValueError("the model was loaded with device_map=, and anyfit places it itself; load it without device_map")
    dtypes = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point()}
    if dtypes - {"float32", "bfloat16"}:
        wrong = sorted(dtypes - {"float32", "bfloat16"})[0]
        raise ValueError(f"the model has {wrong} weights; load it in float32: from_pretrained(..., dtype='float32')")
    if "bfloat16" in dtypes and not bf16:
        raise ValueError(
            "the model has bfloat16 weights, and bf16=False; train with bf16=True (bf16 weights with exact fp32 masters), or "
            "load it in float32: from_pretrained(..., dtype='float32')"
        )
