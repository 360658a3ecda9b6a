"""Read and write every container safely, tensor by tensor."""

from fedmerge.checkpoint._checkpoint import Checkpoint, from_state_dict, open_checkpoint
from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._locks import LockFile
from fedmerge.checkpoint._named import NamedTensors, open_tensors
from fedmerge.checkpoint._npy import Rows, StoredRows, in_memory, read_npy
from fedmerge.checkpoint._npz import open_npz
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
    "NamedTensors",
    "ReadOptions",
    "Rows",
    "Staging",
    "StoredRows",
    "array_digest",
    "check_output",
    "check_targets",
    "client_names",
    "expand_paths",
    "from_state_dict",
    "in_memory",
    "merged_files",
    "naming_alone",
    "open_checkpoint",
    "open_npz",
    "open_tensors",
    "parse_size",
    "read_npy",
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
