"""Pretended GPUs on a torch for CPUs: tensors say cuda:N, and their numbers are real and lie in CPU
memory.

What mixes devices raises as on a GPU; numbers flow through autograd, the optimizer, caches and
FSDP2 (over gloo). This shows neither kernels nor rounding nor speed, nothing asynchronous, not
NCCL, and no vLLM. It leans on private symbols of torch 2.13.
"""

import contextlib
import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
COPYING = {aten._to_copy, aten.copy_}
COLLECTIVES = ("c10d", "_c10d_functional")
usual_data, usual_attention = (
    torch._C.TensorBase.data,
    torch.nn.functional.scaled_dot_product_attention,
)
kept = []  # what C++ points to


# --- what C++ and Python ask of CUDA --------------------------------------------------------------


def tell_cpp() -> None:
    """Autograd wants a guard of CUDA's devices, and "there is CUDA". `_ensureCUDADeviceGuardSet`
    puts a guard of 8 pretended devices in place of one that counts none, so such a one is put there
    first. In the table of CUDAHooks a few functions are replaced; which of them is hasCUDA is found
    by calling it."""
    folder = Path(torch.__file__).parent / "lib"
    c10, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    table_type, method = ctypes.c_void_p * 120, ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)

    def functions(answer: int, called: list) -> list[int]:
        made = [
            method(lambda self, slot=slot: called.append(slot) or answer) for slot in range(120)
        ]
        kept.append(made)
        return [ctypes.cast(function, ctypes.c_void_p).value for function in made]

    def table(addresses: list[int]) -> int:
        kept.append(table_type(*addresses))
        return ctypes.addressof(kept[-1])

    registry = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    kept.append(guard := ctypes.c_void_p(table(functions(0, []))))
    registry[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    cpu._ZN2at6detail12getCUDAHooksEv.restype = ctypes.c_void_p
    hooks, called = ctypes.c_void_p.from_address(cpu._ZN2at6detail12getCUDAHooksEv()), []
    usual, hooks.value = hooks.value, table(functions(0, called))
    torch._C._accelerator_getAccelerator()  # asks hasCUDA
    addresses, yes = [*table_type.from_address(usual)], functions(1, [])
    for slot in (2, 3, 4, called[0]):  # isBuilt, isAvailable, hasPrimaryContext, hasCUDA
        addresses[slot] = yes[slot]
    hooks.value = table(addresses)


class Stub:
    """A stream, an event or a device as a context: nothing happens."""

    __init__ = lambda self, *_, **__: None
    __enter__ = record = lambda self, *_: self
    __exit__ = wait_stream = wait_event = record_event = is_capturing = lambda self, *_: None


def current() -> int:
    """The device of this thread; autograd has a thread for each."""
    return torch._C._accelerator_getDeviceIndex()


def answer_for_cuda() -> None:
    """What is asked of torch.cuda gets an answer. FakeTensorMode needs no more."""
    torch.cuda._lazy_init = lambda: None
    tell_cpp()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) is dispatched too
    gpus = len([name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name])

    def set_device(device) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        assert 0 <= index < gpus, f"CUDA error: invalid device ordinal {index}"
        torch._C._accelerator_setDeviceIndex(index)

    done = lambda *_: 0
    answers = dict(
        is_available=lambda: gpus > 0, is_initialized=lambda: gpus > 0, device_count=lambda: gpus,
        current_device=current, set_device=set_device,
        current_stream=Stub, stream=Stub, Stream=Stub, Event=Stub,
        cudart=lambda: SimpleNamespace(cudaHostRegister=done, cudaHostUnregister=done),
    )  # fmt: skip
    nothing = "synchronize empty_cache check_error set_per_process_memory_fraction"
    # Each a function of its own, as torch.compile's tables want it.
    answers |= {name: lambda *_: 0 for name in nothing.split()}
    answers["is_bf16_supported"] = lambda including_emulation: "PRETENDED_T4" not in os.environ
    vars(torch.cuda).update(answers)
    torch.accelerator.current_stream = Stub  # FSDP asks it for a part that is frozen


# --- tensors --------------------------------------------------------------------------------------


class GpuTensor(torch.Tensor):
    """Says that it is on a GPU; `inner` has its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int):
        options = dict(dtype=inner.dtype, device=f"cuda:{index}")
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), **options
        )
        made.inner = inner
        return made

    untyped_storage = lambda self: self.inner.untyped_storage()
    tolist = lambda self: self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {}) if ours(types) else NotImplemented


class Everywhere(TorchDispatchMode):
    """For calls without a tensor on a device, such as torch.zeros(3, device="cuda")."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensor asks for shapes.
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {}) if ours(types) else NotImplemented


def ours(types) -> bool:
    """Whether none of these is a DTensor or the like, which takes the call apart itself."""
    return all(
        issubclass(kind, GpuTensor) or kind in (torch.Tensor, torch.nn.Parameter) for kind in types
    )


def dispatch(func, args, kwargs):
    """Do the call on the inner tensors, if their devices go together, and say that the results are
    on the GPU."""
    flat, shape = tree_flatten((args, kwargs))
    on_gpus, wanted = (
        [a for a in flat if isinstance(a, kind)] for kind in (GpuTensor, torch.device)
    )
    if not on_gpus and (not wanted or wanted[0].type != "cuda"):
        return func(*args, **kwargs)
    if func._can_decompose():  # in inference mode, calls that are made of others come as they are
        with Everywhere():
            return func.decompose(*args, **kwargs)
    index = device_of(func, flat, on_gpus, args)
    if wanted:
        index = None
        if wanted[0].type == "cuda":
            index = current() if wanted[0].index is None else wanted[0].index
            assert index < torch.cuda.device_count(), f"CUDA error: invalid device ordinal {index}"
    inner = [inner_of(a) for a in flat]
    if func is aten.mm.dtype:  # a CPU has no product of bf16 in fp32
        return GpuTensor(inner[0].float() @ inner[1].float(), index)
    new_args, new_kwargs = tree_unflatten(inner, shape)
    out = func(*new_args, **new_kwargs)
    if index is not None:
        refuse_large(tree_flatten(out)[0], index)
    owners = {id(i): a for i, a in zip(inner, flat) if isinstance(a, torch.Tensor)}

    def outer(x):
        if not isinstance(x, torch.Tensor):
            return x
        x = x.trigger_wait() if hasattr(x, "trigger_wait") else x  # of a collective
        owner = owners.get(id(x))
        assert owner is None or owner.shape == x.shape, (
            f"{func} changes a shape in place, which is not pretended"
        )
        return owner if owner is not None else x if index is None else GpuTensor(x, index)

    # Its view is no inference tensor either.
    of_parameter = func.is_view and not on_gpus[0].is_inference()
    with torch.inference_mode(False) if of_parameter else contextlib.nullcontext():
        return tree_map(outer, out)


def refuse_large(tensors, index: int) -> None:
    """torch.OutOfMemoryError for a tensor of more than PRETENDED_LARGEST elements, on the GPUs of
    PRETENDED_LARGEST_ON, or on any."""
    most = int(os.environ.get("PRETENDED_LARGEST", 0))
    where = os.environ.get("PRETENDED_LARGEST_ON", "")
    if not most or where not in ("", str(index)):
        return
    if any(isinstance(each, torch.Tensor) and each.numel() > most for each in tensors):
        raise torch.OutOfMemoryError("CUDA out of memory. It is pretended")


def inner_of(argument):
    if isinstance(argument, GpuTensor):
        return argument.inner
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def device_of(func, flat, on_gpus, args) -> int | None:
    """The index of the GPU that this call is on. RuntimeError if its tensors are not on one
    device."""
    packet, indices = func.overloadpacket, {a.device.index for a in on_gpus}
    others = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, GpuTensor)]
    if packet in COPYING:
        return args[0].device.index if isinstance(args[0], GpuTensor) else None
    if torch.Tag.pointwise in func.tags:
        others = [a for a in others if a.dim() > 0]  # a number on the CPU goes along
    if (others and on_gpus and func.namespace not in COLLECTIVES) or len(indices) > 1:
        found = [(*a.shape, str(a.device)) for a in [*on_gpus[:4], *others[:4]]]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {found}")
    return indices.pop() if indices else None


def set_data(tensor, value):
    if not isinstance(value, GpuTensor) and not isinstance(tensor, GpuTensor):
        return usual_data.__set__(tensor, value)
    new = torch.nn.Parameter(value.detach(), tensor.requires_grad)
    return torch.utils.swap_tensors(tensor, new)


def attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention by the CPU's flash kernel, which autograd knows."""
    if not isinstance(q, GpuTensor):
        return usual_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if enable_gqa else x for x in (k, v))
    options = dict(attn_mask=attn_mask, scale=scale)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, **options)[0]


def pretend() -> None:
    """From now on this process has its GPUs."""
    import torch.distributed as dist

    answer_for_cuda()
    torch.Tensor.data = property(lambda self: usual_data.__get__(self), set_data)
    torch.nn.functional.scaled_dot_product_attention = attention
    torch.__future__.set_swap_module_params_on_conversion(True)
    start = dist.init_process_group
    dist.init_process_group = lambda backend, *args, **kw: start(
        backend.replace("nccl", "gloo"), *args, **kw
    )
    Everywhere().__enter__()
