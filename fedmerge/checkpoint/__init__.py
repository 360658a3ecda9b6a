"""Read and write every container safely, tensor by tensor."""

from fedmerge.checkpoint._checkpoint import Checkpoint, from_state_dict, open_checkpoint
from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._locks import LockFile
from fedmerge.checkpoint._output import OUTPUT_SUFFIXES, check_output, check_targets
from fedmerge.checkpoint._paths import MODEL_SUFFIXES, client_names, expand_paths, merged_files
from fedmerge.checkpoint._record import read_record, readable, record_path
from fedmerge.checkpoint._shards import parse_size, written_path
from fedmerge.checkpoint._staging import Staging, naming_alone, staging
from fedmerge.checkpoint._tensors import array_digest, to_torch
from fedmerge.checkpoint._write import write_bytes, write_model, write_text

__all__ = [
    "MODEL_SUFFIXES",
    "OUTPUT_SUFFIXES",
    "Checkpoint",
    "LockFile",
    "ReadOptions",
    "Staging",
    "array_digest",
    "check_output",
    "check_targets",
    "client_names",
    "expand_paths",
    "from_state_dict",
    "merged_files",
    "naming_alone",
    "open_checkpoint",
    "parse_size",
    "read_record",
    "readable",
    "record_path",
    "staging",
    "to_torch",
    "write_bytes",
    "write_model",
    "write_text",
    "written_path",
]
