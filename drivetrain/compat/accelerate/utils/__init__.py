"""All names of `accelerate.utils`, imported on first use."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.accelerate.utils.tqdm import tqdm as tqdm  # before the module of this name becomes an attribute
from drivetrain.compat.handed_on import import_module

# module -> the names of it that are also here
_NAMES = {
    "ao": ("convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers"),
    "bnb": ("has_4bit_bnb_layers load_and_quantize_model"),
    "constants": (
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME "
        "RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME "
        "SAMPLER_NAME SCALER_NAME SCHEDULER_NAME TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS "
        "WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"
    ),
    "dataclasses": (
        "AORecipeKwargs AutocastKwargs BnbQuantizationConfig ComputeEnvironment CustomDtype "
        "DataLoaderConfiguration DDPCommunicationHookType DeepSpeedPlugin DeepSpeedSequenceParallelConfig "
        "DistributedDataParallelKwargs DistributedType DynamoBackend FP8RecipeKwargs "
        "FullyShardedDataParallelPlugin GradientAccumulationPlugin GradScalerKwargs InitProcessGroupKwargs "
        "KwargsHandler LoggerType MegatronLMPlugin MSAMPRecipeKwargs ParallelismConfig PrecisionType "
        "ProfileKwargs ProjectConfiguration RNGType SageMakerDistributedType TensorInformation TERecipeKwargs "
        "TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig TorchTensorParallelPlugin"
    ),
    "deepspeed": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
        "HfDeepSpeedConfig get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed"
    ),
    "environment": (
        "are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support clear_environment "
        "convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type get_gpu_info "
        "get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment "
        "purge_accelerate_environment set_numa_affinity str_to_bool"
    ),
    "fsdp_utils": (
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied "
        "fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer "
        "merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    "launch": (
        "PrepareForLaunch _filter_args prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu"
    ),
    "megatron_lm": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep "
        "add_model_config_to_megatron_parser avg_losses_across_data_parallel_group "
        "gather_across_data_parallel_groups megatron_lm_initialize megatron_lm_prepare_data_loader "
        "megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer "
        "megatron_lm_prepare_scheduler"
    ),
    "memory": ("find_executable_batch_size release_memory"),
    "modeling": (
        "align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device compute_module_sizes convert_file_size_to_int dtype_byte_size "
        "find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size get_max_memory "
        "get_mixed_precision_context_manager has_offloaded_params id_tensor_storage infer_auto_device_map "
        "is_peft_model load_checkpoint_in_model load_offloaded_weights load_state_dict named_module_tensors "
        "retie_parameters set_module_tensor_to_device"
    ),
    "offload": (
        "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight "
        "offload_state_dict offload_weight save_offload_index"
    ),
    "operations": (
        "CannotPadNestedTensorWarning GatheredParameters broadcast broadcast_object_list concatenate "
        "convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device gather "
        "gather_object get_data_structure honor_type ignorant_find_batch_size initialize_tensors "
        "is_namedtuple is_tensor_information is_torch_tensor listify pad_across_processes pad_input_tensors "
        "recursively_apply reduce send_to_device slice_tensors"
    ),
    "other": (
        "check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed "
        "compile_regions_fsdp2 convert_bytes extract_model_from_parallel get_model_tp_size "
        "get_module_children_bottom_up get_pretty_name has_compiled_regions is_compiled_module is_port_in_use "
        "load merge_dicts model_has_dtensor recursive_getattr save wait_for_everyone write_basic_config"
    ),
    "random": ("set_seed synchronize_rng_state synchronize_rng_states"),
    "torch_xla": ("install_xla"),
    "tqdm": ("tqdm"),
    "transformer_engine": ("apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers"),
    "versions": ("compare_versions is_torch_version"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name, "imports" if name.startswith("is_") or name.endswith("_required") else None)
    if home is None:
        if name in _NAMES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
