from .config_widths import (
    SaidWidth as SaidWidth,
    held_to_config as held_to_config,
    said_widths as said_widths,
    with_widths as with_widths,
)
from .example_inputs import names_of_inputs as names_of_inputs
from .libraries import (
    LIBRARIES as LIBRARIES,
    FolderCode as FolderCode,
    code_of_folder as code_of_folder,
    library_model as library_model,
)
from .transformers_models import (
    ConfiguredModel as ConfiguredModel,
    config_shapes as config_shapes,
)
