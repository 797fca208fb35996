"""Communication."""

from typing import Final

from deepspeed.table.row import Row

ROWS: Final[tuple[Row, ...]] = (
    Row("comm comm.comm", "*", "mizzen.comm"),
    Row("comm comm.comm", "set_backend", ".tools"),
    Row(
        "comm comm.comm",
        "all_gather_coalesced all_gather_into_tensor all_to_all_single reduce_scatter_tensor configure get_global_rank "
        "inference_all_reduce allgather_fn reduce_scatter_fn initialize_mesh_device enable_symm_mem_for_group "
        "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager "
        "has_comm_data get_comm_operation_count get_logged_comm_ops "
        "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher",
        ".comm",
    ),
    Row("comm comm.comm comm.reduce_op", "ReduceOp", ".comm"),
    Row("comm comm.comm", "P2POp batch_isend_irecv ProcessGroup", "torch.distributed"),
    Row("comm.backend comm.torch", "Backend TorchBackend=Backend", "mizzen.comm"),
    Row(
        "comm.torch",
        "all_gather_comm_off reduce_scatter_comm_off broadcast_comm_off all_reduce_comm_off reduce_comm_off "
        "backward_comm_off",
        ".comm_log",
    ),
    Row("comm.ccl", "CCLBackend", waits_for="oneCCL"),
    Row(
        "comm.utils",
        "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher",
        ".comm",
    ),
    Row("comm.config", "DeepSpeedCommsConfig=CommsLoggerConfig CommsLoggerConfig", "mizzen.config.observe"),
)
