# Help lists commands in the order in which their modules are loaded, which is the application's.
import rlhf.flows.cli.app  # noqa: F401
