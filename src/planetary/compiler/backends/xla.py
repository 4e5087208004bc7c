"""StableHLO functions as programs of XLA, through JAX's PJRT client.

JAX has no public call for "run this module": the client used here is the one that `jax.jit` itself uses. This is the
one file that knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jaxlib import xla_client

from planetary.compiler import ir
from planetary.compiler.rewrites.barriers import barriers_to_selects
from planetary.compiler.rewrites.precision import exact_products, widen_factors
from planetary.core.errors import CompileError, ResourceError, UserError

_MESH = "island"
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # XLA's word


def in_use() -> bool:
    """Return whether JAX has opened devices in this process; their number and threads are then fixed."""
    return xla_bridge.backends_are_initialized()


def host_device() -> Any:
    """Return this machine's CPU, as JAX has it in this process."""
    return jax.devices("cpu")[0]


def visible_gpus() -> list[int] | None:
    """Return the numbers of the CUDA devices that JAX opens or has opened in this process; None: all."""
    names = xla_bridge.CUDA_VISIBLE_DEVICES.value
    return None if names == "all" else [int(name) for name in names.split(",")]


def as_main(
    stablehlo: str | bytes,
    function: str,
    *,
    replaced: Sequence[int] = (),
    split: Sequence[int] = (),
    devices: int = 1,
    platform: str = "cpu",
) -> tuple[str, list[str]]:
    """Return a module whose only public function, `main`, is `function`, and the arguments' element types.

    Args:
        stablehlo: text or a portable artifact.
        function: name in the module.
        replaced: the argument that each of the first results overwrites; the two have the same type.
        split: the arguments of which every device holds an equal part, along the first dimension. All other
            arguments and all results are whole on every device.
        devices: how many devices run the program together.
        platform: of the devices, as JAX names it.

    Raises:
        CompileError: the module does not parse, or has no such function.
        UserError: an argument of `split` cannot be divided among the devices.
    """
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        found = ir.functions(module)
        if function not in found:
            raise CompileError(f"the module has no function {function!r}; it has: {', '.join(found)}")
        if function != "main":
            for name, other in found.items():
                if name != function:
                    ir.erase_function(other)
            ir.rename_function(found[function], "main")
        main = found[function]
        types = ir.argument_types(main)
        if replaced or devices > 1:
            _annotate(main, replaced, split, devices)
        if platform == "cpu":
            widen_factors(module)
            barriers_to_selects(module)
        elif platform:
            exact_products(module)
        text = ir.to_text(module)
        if devices > 1:
            # The mesh is an operation of the module; JAX's bindings make attributes of it from text only.
            opening, brace, rest = text.partition("{\n")
            text = f'{opening}{brace}  sdy.mesh @{_MESH} = <["{_MESH}"={devices}]>\n{rest}'
        return text, [str(ir.element_of_type(kind)) for kind in types]


def _annotate(main: Any, replaced: Sequence[int], split: Sequence[int], devices: int) -> None:
    aliases = {argument: result for result, argument in enumerate(replaced)}
    arguments = []
    for i, kind in enumerate(ir.argument_types(main)):
        entries = [f"tf.aliasing_output = {aliases[i]} : i32"] if i in aliases else []
        if devices > 1:
            entries.append(f"sdy.sharding = {_sharding(ir.shape_of_type(kind), i in split, devices)}")
        arguments.append(f"{{{', '.join(entries)}}}")
    main.operation.attributes["arg_attrs"] = ir.parse_attribute(f"[{', '.join(arguments)}]")
    if devices > 1:
        whole = [
            f"{{sdy.sharding = {_sharding(ir.shape_of_type(kind), False, devices)}}}" for kind in ir.result_types(main)
        ]
        main.operation.attributes["res_attrs"] = ir.parse_attribute(f"[{', '.join(whole)}]")


def _sharding(shape: Sequence[int], split: bool, devices: int) -> str:
    if split and (not shape or shape[0] % devices):
        raise UserError(
            f"a batch argument of shape {list(shape)} cannot be divided among the {devices} devices of an island: "
            "make the batch size a multiple of the number of devices"
        )
    dimensions = ["{}"] * len(shape)
    if split:
        dimensions[0] = f'{{"{_MESH}"}}'
    return f"#sdy.sharding<@{_MESH}, [{', '.join(dimensions)}]>"


def compile_main(text: str, devices: Sequence[Any], *, optimise: bool = True) -> Any:
    """Compile a module of `as_main` for one device, or for an island that runs it together.

    Args:
        text: the module.
        devices: of JAX, all of one platform.
        optimise: False compiles faster and executes operation by operation.

    Returns:
        the executable of XLA's client, to be called with `run`.

    Raises:
        CompileError: XLA refuses the module.
        ResourceError: the device's memory does not suffice to compile it.
    """
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = len(devices)
    if len(devices) > 1:
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = True
        ids = np.array([[device.id for device in devices]], np.int32)
        assignment = xla_client.DeviceAssignment.create(ids)
        options.device_assignment = build.device_assignment = assignment
    if not optimise:
        build.debug_options.xla_backend_optimization_level = 0
    if devices[0].platform != "cpu" and "HIGHEST" in text:
        # Triton's kernels of float32 products take minutes to compile and tune; cuBLAS has them ready.
        options.env_option_overrides = [("xla_gpu_enable_triton_gemm", False)]
    client = devices[0].client
    try:
        return client.compile_and_load(text.encode(), xla_client.DeviceList(tuple(devices)), options)
    except Exception as error:  # XLA raises its own class, which is not public either
        if _OUT_OF_MEMORY in str(error):  # kernels are tried out on the device, whose memory another process may hold
            raise ResourceError(
                f"the memory of {devices[0]} does not suffice to compile the module for it: "
                f"{_line_with(_OUT_OF_MEMORY, str(error))}. End other programs on the device, start fewer workers "
                "there, or take a smaller batch"
            ) from error
        raise CompileError(f"XLA cannot compile the module for {devices[0].platform}: {error}") from error


def _line_with(word: str, text: str) -> str:
    return next(line.strip() for line in text.splitlines() if word in line)


def run(executable: Any, arguments: Sequence[Any]) -> list[list[Any]]:
    """Run a compiled module; arrays a result overwrites are gone afterwards.

    Returns the array of each result on each device. They may still be under computation.
    """
    return executable.execute_sharded(list(arguments)).disassemble_into_single_device_arrays()


def place(array: Any, dtype: str, where: Any) -> Any:
    """Put a host array on a device or on the devices of a sharding, with exactly the element type `dtype`.

    The host array may be used directly by a CPU device: it must not change any more.
    """
    if dtype == "bf16":
        array = array.view(jax.numpy.bfloat16)
    with jax.enable_x64(True):  # otherwise 64-bit numbers would be cut down
        return jax.device_put(array, where)
