# For type checkers and editors: what genmodels/__init__.py imports at its first use.
from genmodels.api import Model as Model
from genmodels.api import Samples as Samples
from genmodels.api import Speech as Speech
from genmodels.api import evaluate as evaluate
from genmodels.api import load as load
from genmodels.api import train as train

__version__: str
