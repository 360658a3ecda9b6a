"""What reading one checkpoint may cost, whatever its files say: counted while they are read."""

from dataclasses import dataclass

MOST_STEPS = 2_000_000  # of all pickles: fifty thousand tensors take as many
MOST_VALUES = 600_000  # lists, dictionaries and objects that pickles make; each fills 80 bytes
MOST_ITEMS = 2_000_000  # that functions are given by pickles, in all their arguments
MOST_TENSORS = 50_000
MOST_RECORDS = 200_000  # of all zip archives, also of those inside others


@dataclass
class Budget:
    """What is left for one checkpoint; all its files and the archives inside them share it."""

    steps: int = MOST_STEPS
    values: int = MOST_VALUES
    items: int = MOST_ITEMS
    tensors: int = MOST_TENSORS
    records: int = MOST_RECORDS

    def take_step(self) -> None:
        """Count an opcode of a pickle."""
        self.steps -= 1
        if self.steps < 0:
            raise ValueError(f"it has more than {MOST_STEPS:,} steps")

    def take_value(self) -> None:
        """Count a value that has room for others."""
        self.values -= 1
        if self.values < 0:
            raise ValueError(f"it makes more than {MOST_VALUES:,} lists and objects")

    def take_items(self, count: int) -> None:
        """Count what a function is given."""
        self.items -= count
        if self.items < 0:
            raise ValueError(f"its functions are given more than {MOST_ITEMS:,} values")

    def take_tensors(self, count: int = 1) -> None:
        """Count tensors."""
        self.tensors -= count
        if self.tensors < 0:
            raise ValueError(f"it has more than {MOST_TENSORS:,} tensors")

    def take_record(self) -> None:
        """Count an entry of an archive's directory."""
        self.records -= 1
        if self.records < 0:
            raise ValueError(f"it has more than {MOST_RECORDS:,} records")
