"""Data sheets of GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Data sheet of a GPU."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    """Bandwidth of the GPU memory in GB/s."""
    tflops: float
    """Dense bf16 throughput in TFLOP/s."""
    link_gbs: float
    """One-way bandwidth in GB/s to another GPU of the node."""
    network_gbs: float = 50
    """One-way bandwidth in GB/s to another node, per GPU; default: 400 Gb/s."""
    host_gbs: float = 64
    """One-way bandwidth in GB/s to host memory; default: PCIe 5, 16 lanes."""
    per_node: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="H800", memory_gb=80, bandwidth_gbs=3350, tflops=989, link_gbs=200),
        Gpu(name="H100", memory_gb=80, bandwidth_gbs=3350, tflops=989, link_gbs=450),
        Gpu(name="H200", memory_gb=141, bandwidth_gbs=4800, tflops=989, link_gbs=450),
        Gpu(name="H20", memory_gb=96, bandwidth_gbs=4000, tflops=148, link_gbs=450),
        Gpu(
            name="A100",
            memory_gb=80,
            bandwidth_gbs=2039,
            tflops=312,
            link_gbs=300,
            network_gbs=25,
            host_gbs=32,
        ),
    )
}
"""GPUs by name, from NVIDIA's data sheets; H800 is an H100 with slower links."""


def gpu_named(name: str) -> Gpu | None:
    """Return the data sheet for the driver's name of a GPU, such as `NVIDIA H100 80GB HBM3`."""
    words = name.upper().replace("-", " ").split()
    return next((gpu for key, gpu in GPUS.items() if key in words), None)
