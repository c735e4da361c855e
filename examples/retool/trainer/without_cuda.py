"""Lets vime's trainer, Megatron-LM and torch run where there is no GPU. No way to train for real, and not meant to be.

It shows on any machine that data, masks, advantages, flags, checkpoints and the exchange of weights are right. What it
replaces is exactly what remains to be shown on a GPU. Where there is one, this module refuses to load.

What is stood in for (one function here for each, named in REPAIRS):

    torch.cuda, device "cuda"       the CPU; streams, events and memory figures that do nothing
    NCCL                            gloo
    Transformer Engine              the same layers and parameter names in plain torch, so that vime's and mbridge's
                                    tables of weights apply; attention by torch's own, sequence for sequence
    Apex's FusedAdam                the same arithmetic in plain torch; a run in float32 can be gone on with
    fused kernels of Megatron       off, whatever the flags say
    triton, torch_memory_saver,     empty modules; what they are for does not happen on a CPU
    wandb (where it is missing)
    vime's process groups that      torch's own: nothing sleeps here
    sleep with the GPU
    numpy < 2                       the version that is installed, which vime refuses by its number alone
    names that vLLM 0.32 moved      where vime's July checkout looks for them
    vLLM's packed linear layers     plain ones (in the engine's process, see `_plain_linear`)

The environment of the trainer imports this module when Python starts (`trainer.sources.make_environment`), before
anything of the above; each repair is made when the module that it is for has been imported. With
RETOOL_ENGINE_WITHOUT_CUDA=1 only those of the engine are made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

ENGINE_ONLY = "RETOOL_ENGINE_WITHOUT_CUDA"
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


def gpu_here() -> str:
    """What shows that this machine has a GPU; "" where nothing does."""
    return next((device for device in GPU_DEVICES if os.path.exists(device)), "")


# ---------------------------------------------------------------------------------------------------------------------
# torch
# ---------------------------------------------------------------------------------------------------------------------

FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint"
    " randn randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros zeros_like"
)
TENSOR_FACTORIES = "new_empty new_full new_ones new_tensor new_zeros"
NOTHING = (
    "_lazy_init empty_cache init ipc_collect manual_seed_all reset_max_memory_allocated reset_peak_memory_stats"
    " set_device set_stream synchronize"
)
ZERO = "device_memory_used max_memory_allocated max_memory_reserved memory_allocated memory_reserved"


class _Idle:
    """Stands for a CUDA stream, event or device: whatever is asked of it is done already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any): ...
    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Idle()

    def _done(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = wait_event = wait_stream = synchronize = _done


def _answer(value: Any = None) -> Callable[..., Any]:
    return lambda *args, **kwargs: value  # one each: torch.compile asks that no two names share a function


def _torch(torch: Any) -> None:
    cpu = torch.device("cpu")

    def place(device: Any) -> Any:
        """The CPU for every form in which a GPU is named: "cuda:0", its number, a torch.device."""
        if isinstance(device, int) and not isinstance(device, bool):
            return cpu
        named = device.type if isinstance(device, torch.device) else device
        return cpu if isinstance(named, str) and named.startswith("cuda") else device

    def by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = place(kwargs["device"])
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return call

    def by_position(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and not isinstance(args[0], torch.Tensor | torch.dtype):
                args = (place(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = place(kwargs["device"])
            return function(self, *args, **kwargs)

        return call

    # torch remembers, when it is first asked, which functions make tensors under `with torch.device(...)`. It has to
    # find the real ones: else models that transformers makes on "meta" have wrong rotary frequencies, silently.
    importlib.import_module("torch.utils._device")._device_constructors()
    for name in FACTORIES.split():
        setattr(torch, name, by_keyword(getattr(torch, name)))
    for name in TENSOR_FACTORIES.split():
        setattr(torch.Tensor, name, by_keyword(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = by_position(owner.to)
        owner.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = _answer()
    torch.Tensor.type = _typed(torch.Tensor.type)
    _cuda(torch, cpu)
    _gloo(torch.distributed)


def _typed(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizers sort parameters by the text "torch.cuda.FloatTensor" and refuse others."""

    @functools.wraps(type_of)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            return type_of(self, args[0].replace("torch.cuda.", "torch."), *args[1:], **kwargs)
        told = type_of(self, *args, **kwargs)
        return told.replace("torch.", "torch.cuda.", 1) if isinstance(told, str) else told

    return call


def _cuda(torch: Any, cpu: Any) -> None:
    cuda = torch.cuda

    def free_and_total(*args: Any) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    class Generators:
        def __getitem__(self, number: int) -> Any:
            return torch.default_generator

    properties = types.SimpleNamespace(
        major=8, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1, uuid="cpu"
    )
    for name in NOTHING.split():
        setattr(cuda, name, _answer())
    for name in ZERO.split():
        setattr(cuda, name, _answer(0))
    for name in ("Stream", "Event", "device"):
        setattr(cuda, name, type(name, (_Idle,), {"device": cpu}))
    stream = cuda.Stream()
    cuda.current_stream, cuda.default_stream, cuda.stream = _answer(stream), _answer(stream), _answer(stream)
    cuda.current_device, cuda.device_count = _answer(cpu), _answer(1)
    cuda.get_device_name, cuda.get_device_capability = _answer("cpu"), _answer((8, 0))
    cuda.get_device_properties, cuda.mem_get_info = _answer(properties), free_and_total
    cuda.memory_stats = lambda *args: defaultdict(int)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.default_generators = Generators()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        owner.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _answer(), _answer()
    torch._C._host_emptyCache = _answer()


def _gloo(distributed: Any) -> None:
    def with_gloo(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        """`place`: of the backend among the positional arguments."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)  # of NCCL
            given = list(args[: place + 1])
            if len(given) > place:
                kwargs["backend"] = given.pop(place)
            if "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            return function(*given, **kwargs)

        return call

    for name, place in (("init_process_group", 0), ("new_group", 2)):
        replaced = with_gloo(getattr(distributed, name), place)
        setattr(distributed, name, replaced)
        setattr(distributed.distributed_c10d, name, replaced)


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-LM
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _layers() -> types.SimpleNamespace:
    """What Megatron takes from Transformer Engine for a Qwen3, with the same parameter names, in plain torch."""
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from torch.nn.functional import rms_norm, scaled_dot_product_attention

    def norm_weight(config: Any, size: int) -> Any:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise NotImplementedError("the CPU layer knows RMSNorm alone, which is what Qwen3 has")
        weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = False, -1, 1
        return weight

    class Norm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
            super().__init__()
            self.eps = eps
            self.weight = norm_weight(config, hidden_size)

        def forward(self, x: Any) -> Any:
            return rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)

    class Column(ColumnParallelLinear):
        def __init__(self, *sizes: int, gather_output: bool = False, tp_comm_buffer_name: str = "", **kwargs: Any):
            super().__init__(*sizes, gather_output=gather_output, **kwargs)

    class NormColumn(Column):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.eps = config.layernorm_epsilon
            self.layer_norm_weight = norm_weight(config, input_size)

        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            normed = rms_norm(x.float(), x.shape[-1:], self.layer_norm_weight.float(), self.eps)
            return super().forward(normed.to(x.dtype), *args, **kwargs)

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            state = self.state_dict(prefix="", keep_vars=True)
            state.pop("_extra_state", None)
            split_along = {"weight": 0, "bias": 0}
            return make_sharded_tensors_for_checkpoint(
                state,
                prefix,
                split_along,
                sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )

    class Row(RowParallelLinear):
        def __init__(self, *sizes: int, tp_comm_buffer_name: str = "", **kwargs: Any):
            super().__init__(*sizes, **kwargs)

    class Attention(MegatronModule):
        """Causal attention over packed sequences, as `cu_seqlens` bounds them, or over a padded batch."""

        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **_: Any):
            super().__init__(config=config)
            if config.context_parallel_size > 1:
                raise NotImplementedError("the CPU layer has no attention across context parallel ranks")
            self.scale = softmax_scale

        def forward(
            self, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any = None, **_: Any
        ) -> Any:
            """query, key, value: [tokens, heads, size] where packed, else [sequence, batch, heads, size]."""
            if packed_seq_params is None:
                return torch.stack(
                    [
                        self._one(*parts)
                        for parts in zip(*(part.unbind(1) for part in (query, key, value)), strict=True)
                    ],
                    1,
                )
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            spans = [slice(*span) for span in zip(bounds, bounds[1:], strict=False) if span[0] < span[1]]
            return torch.cat([self._one(query[span], key[span], value[span]) for span in spans])

        def _one(self, *sequence: Any) -> Any:
            query, key, value = (part.transpose(0, 1)[None] for part in sequence)
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
            return out[0].transpose(0, 1).flatten(1)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {}

    class Provider(LocalSpecProvider):
        def __init__(self, *args: Any, **kwargs: Any): ...

        column_parallel_linear = _answer(Column)
        row_parallel_linear = _answer(Row)
        column_parallel_layer_norm_linear = _answer(NormColumn)
        fuse_layernorm_and_linear = _answer(True)
        layer_norm = _answer(Norm)
        core_attention = _answer(Attention)

    return types.SimpleNamespace(Norm=Norm, Provider=Provider)


@functools.cache
def _adam() -> type:
    """Torch's own Adam cannot resume a run: Megatron asks it for the step of states that are not there yet."""
    import torch

    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            bias_correction: bool = True,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            adam_w_mode: bool = True,
            weight_decay: float = 0.0,
            **_: Any,
        ):
            names = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
            super().__init__(params, {**names, "weight_decay": weight_decay})
            if not adam_w_mode:
                raise NotImplementedError(
                    "the CPU layer knows AdamW alone, which is what the launch scripts train with"
                )

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                if not group["params"]:
                    continue
                group["step"] = group.get("step", 0) + 1
                (first, second), corrected = group["betas"], group["bias_correction"]
                scale = 1 - first ** group["step"] if corrected else 1.0
                square_scale = 1 - second ** group["step"] if corrected else 1.0
                for parameter in group["params"]:
                    if (grad := parameter.grad) is None:
                        continue
                    state = self.state[parameter]
                    for name in ("exp_avg", "exp_avg_sq"):
                        if name not in state:
                            state[name] = torch.zeros_like(parameter)
                    mean, square = state["exp_avg"], state["exp_avg_sq"]
                    mean.lerp_(grad, 1 - first)
                    square.lerp_(grad * grad, 1 - second)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] / scale * mean / ((square / square_scale).sqrt() + group["eps"]))

    return FusedAdam


def _layer_specs(module: Any) -> None:
    module.TESpecProvider, module.TENorm, module.HAVE_TE = _layers().Provider, _layers().Norm, True


def _final_norm(module: Any) -> None:
    class FinalNorm:  # a class, since Megatron takes a function for a module that is built already
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return _layers().Norm(*args, **kwargs)

    module.LayerNormImpl = FinalNorm


FUSED = (
    "apply_rope_fusion bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion masked_softmax_fusion"
    " moe_permute_fusion moe_router_fusion persist_layer_norm"
)


def _unfused(module: Any) -> None:
    checked = module.TransformerConfig.__post_init__

    def switch_off(self: Any) -> None:
        for name in FUSED.split():
            if hasattr(self, name):
                setattr(self, name, False)
        checked(self)

    module.TransformerConfig.__post_init__ = switch_off


def _optimizer(module: Any) -> None:
    module.Adam, module.USING_PYTORCH_OPTIMIZER = _adam(), False


def _distributed_optimizer(module: Any) -> None:
    import torch

    module.Adam, module.HAVE_APEX_OR_TE, module.USING_APEX_OPTIMIZER = _adam(), True, True
    # In float32 the optimizer's parameters are the model's own, into which Megatron cannot copy what it has saved.
    optimizer = module.DistributedOptimizer
    optimizer.load_state_dict = torch.no_grad()(optimizer.load_state_dict)


# ---------------------------------------------------------------------------------------------------------------------
# vime, and what it takes from vLLM
# ---------------------------------------------------------------------------------------------------------------------


def _any_numpy(module: Any) -> None:
    class Numpy(types.ModuleType):
        __version__ = "1.26.4"

        def __getattr__(self, name: str) -> Any:
            return getattr(numpy, name)

    numpy = module.np
    module.np = Numpy("numpy")


def _plain_groups(module: Any) -> None:
    module.monkey_patch_torch_dist = _answer()


def _nccl_names(module: Any) -> None:
    for name in ("NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"):
        if not hasattr(module, name):  # weights go over the disk here, so it is never used
            setattr(module, name, type(name, (), {}))


def _plain_linear(module: Any) -> None:
    """vLLM 0.32 on a CPU computes with a packed copy of each weight, which `reload_weights`, by which vime updates an
    engine from the disk, does not renew: it answers 200, and the engine mixes old weights with new ones."""
    import torch

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = keep


# ---------------------------------------------------------------------------------------------------------------------
# Modules that are not there
# ---------------------------------------------------------------------------------------------------------------------


def _no_kernels(module: Any) -> None:
    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _raise(f"{module.__name__}.{name} is a kernel for GPUs")

    module.__getattr__ = missing


def _raise(message: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    return call


def _memory_saver(module: Any) -> None:
    nothing = {name: _answer() for name in ("pause", "resume", "get_cpu_backup")}
    contexts = {name: _answer(contextlib.nullcontext()) for name in ("region", "disable")}
    module.torch_memory_saver = types.SimpleNamespace(memory_margin_bytes=0, **nothing, **contexts)


def _no_wandb(module: Any) -> None:
    module.run = None


EMPTY: dict[str, Callable[[Any], None]] = {  # whatever is installed
    "megatron.core.transformer.custom_layers.batch_invariant_kernels": _no_kernels,
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": _no_kernels,
    "megatron.core.inference.contexts.fused_kv_append_kernel": _no_kernels,
    "vime.backends.megatron_utils.kernels.fp8_kernel": _no_kernels,
}
EMPTY_IF_MISSING: dict[str, Callable[[Any], None]] = {"torch_memory_saver": _memory_saver, "wandb": _no_wandb}
MOVED = {"vllm.entrypoints.openai.cli_args": "vllm.entrypoints.launchers.cli_args"}
REPAIRS: dict[str, Callable[[Any], None]] = {
    "torch": _torch,
    "megatron.core.models.gpt.gpt_layer_specs": _layer_specs,
    "megatron.core.transformer.transformer_block": _final_norm,
    "megatron.core.transformer.transformer_config": _unfused,
    "megatron.core.optimizer": _optimizer,
    "megatron.core.optimizer.distrib_optimizer": _distributed_optimizer,
    "vime.backends.megatron_utils.initialize": _any_numpy,
    "vime.utils.reloadable_process_group": _plain_groups,
    "vllm.distributed.weight_transfer.nccl_engine": _nccl_names,
}
ENGINE_REPAIRS: dict[str, Callable[[Any], None]] = {"vllm.model_executor.layers.utils": _plain_linear}


class _Made(importlib.abc.Loader):
    """Loads a module that has no file: empty but for what `fill` puts in, or another one by a second name."""

    def __init__(self, fill: Callable[[Any], None], other: str = ""):
        self.fill, self.other = fill, other

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return importlib.import_module(self.other) if self.other else None

    def exec_module(self, module: types.ModuleType) -> None:
        self.fill(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before Python's own finders; what it repairs, they find."""

    def __init__(self, repairs: dict[str, Callable[[Any], None]], makes: bool):
        self.repairs, self.makes = repairs, makes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.makes and name in EMPTY:
            return importlib.machinery.ModuleSpec(name, _Made(EMPTY[name]))
        if self.makes and name in MOVED:
            return importlib.machinery.ModuleSpec(name, _Made(_answer(), MOVED[name]))
        if name in self.repairs:
            spec = self._found(name, path)
            if spec is not None and spec.loader is not None:
                _repaired(spec.loader, self.repairs[name])
            return spec
        if self.makes and name in EMPTY_IF_MISSING and self._found(name, path) is None:
            return importlib.machinery.ModuleSpec(name, _Made(EMPTY_IF_MISSING[name]))
        return None

    def _found(self, name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        return next((spec for finder in others if (spec := finder.find_spec(name, path))), None)


def _repaired(loader: Any, repair: Callable[[Any], None]) -> None:
    """Have the loader make the repair when it has run the module's own code."""
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        run(module)
        repair(module)

    loader.exec_module = exec_module


def install() -> None:
    """Make the repairs from here on; ends the process where there is a GPU."""
    if device := gpu_here():
        sys.exit(f"error: {__file__} stands in for CUDA, and this machine has a GPU ({device}): train on that one")
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return  # Python reads the file that calls this twice where `lib` and `lib64` are the same folder
    engine = os.environ.get(ENGINE_ONLY) == "1"
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile would want a C++ compiler, and minutes
    sys.meta_path.insert(0, _Finder(ENGINE_REPAIRS if engine else REPAIRS, makes=not engine))
    if not engine and sys.version_info[:2] == (3, 11):
        # Python 3.11 alone pickles a member of an enum by its name, which vime's convert_torch_dist_to_hf.py, that
        # puts dummies in the place of Megatron's classes, cannot read back.
        import enum

        enum.Enum.__reduce_ex__ = lambda self, protocol: (type(self), (self._value_,))  # type: ignore[method-assign]
