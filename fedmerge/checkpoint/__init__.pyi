from .adapter_files import (
    ADAPTER_CONFIG as ADAPTER_CONFIG,
    ADAPTER_MODEL as ADAPTER_MODEL,
    AdapterConfig as AdapterConfig,
    config_to_json as config_to_json,
    module_of as module_of,
    read_adapter_config as read_adapter_config,
)
from .checkpoints import (
    Checkpoint as Checkpoint,
    NamedTensors as NamedTensors,
    from_state_dict as from_state_dict,
    open_checkpoint as open_checkpoint,
    open_tensors as open_tensors,
)
from .files import (
    ReadOptions as ReadOptions,
    SourceFile as SourceFile,
    reason_of as reason_of,
)
from .folders import (
    check_folder as check_folder,
    new_folder as new_folder,
)
from .lightning import (
    LIGHTNING as LIGHTNING,
    entries_to_write as entries_to_write,
)
from .model_folders import (
    CONFIG as CONFIG,
    ModelFolder as ModelFolder,
    different_companions as different_companions,
    model_folder as model_folder,
)
from .npz import (
    LARGEST_INFLATED as LARGEST_INFLATED,
    MOST_INFLATED as MOST_INFLATED,
    Rows as Rows,
    StoredRows as StoredRows,
    in_memory as in_memory,
    open_npz as open_npz,
    read_npy as read_npy,
)
from .outputs import (
    ABANDONED as ABANDONED,
    LockFile as LockFile,
    Staging as Staging,
    leave_nothing as leave_nothing,
    naming_alone as naming_alone,
    parse_size as parse_size,
    readable as readable,
    staging as staging,
)
from .paths import (
    MODEL_SUFFIXES as MODEL_SUFFIXES,
    OUTPUT_SUFFIXES as OUTPUT_SUFFIXES,
    PROGRAM as PROGRAM,
    adapter_folder as adapter_folder,
    check_output as check_output,
    check_targets as check_targets,
    client_names as client_names,
    expand_paths as expand_paths,
    has_record as has_record,
    merged_files as merged_files,
    read_record as read_record,
    record_path as record_path,
    written_path as written_path,
)
from .pickle_machine import (
    UNRESOLVED as UNRESOLVED,
    Trust as Trust,
)
from .pickle_steps import (
    PickleError as PickleError,
    read_pickle as read_pickle,
)
from .tensors import (
    Values as Values,
    View as View,
    non_finite as non_finite,
    raw_bytes as raw_bytes,
    to_torch as to_torch,
    torch_dtype as torch_dtype,
    values_digest as values_digest,
)
from .writing import (
    write_bytes as write_bytes,
    write_model as write_model,
    write_program as write_program,
    write_text as write_text,
)
