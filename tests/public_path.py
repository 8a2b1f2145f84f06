"""jax's public ahead-of-time path, run in a worker to compare with ours."""


def optimized(target: str) -> str:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    sharding = None
    if target != "cpu":
        chips = topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:2x2").devices
        sharding = jax.sharding.SingleDeviceSharding(chips[0])
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
             for shape in ((512, 1024), (1024, 2048), (2048,))]

    def relu_xwb(x, w, b):
        return jax.nn.relu(x @ w + b)

    return jax.jit(relu_xwb).lower(*specs).compile().as_text()
