from .app import app as app
from .command_line import (
    CONFIGURED as CONFIGURED,
    GONE as GONE,
    SET as SET,
    Command as Command,
    Option as Option,
    dials_of as dials_of,
    moved_option as moved_option,
    parameter as parameter,
)
from .commands import (
    COMMANDS as COMMANDS,
    INTRODUCTION as INTRODUCTION,
)
from .config import BY_HAND as BY_HAND, configurable as configurable
from .exit_codes import (
    Interrupted as Interrupted,
    at_work as at_work,
    end_at_once as end_at_once,
    main as main,
    printed as printed,
    run as run,
)
from .help import command_help as command_help, program_help as program_help
from .output import Terminal as Terminal, print_table as print_table
from .plan import pinned_lines as pinned_lines
from .reference import rewritten as rewritten, table as table
from .retrain import Shown as Shown
from .schemas import RESULTS as RESULTS, schemas as schemas, text_of as text_of
