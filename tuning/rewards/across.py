"""A test in one process that uses the names of code in another: a script of the standard library alone.

    python -c SCRIPT READ WRITE            runs main.py, and answers the test over the two pipes
    python -c SCRIPT READ WRITE TEST       runs the test that it reads from TEST; ends with 0 if it passes

The code never sees what a test expects. Plain values are copied: numbers, texts, containers and dates; instances of
their subclasses as the plain value, so that no object of the code decides what it equals. Other objects stay where they
are, and the other process has a proxy. Frames are pickles that create nothing but values.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

TYPES = (bool, int, float, complex, str, bytes, bytearray, list, dict, set, frozenset, range, slice)
PLAIN = (*TYPES, tuple, type(None), type(Ellipsis))
VALUES = {
    **{"builtins": {"Ellipsis", "tuple", *(kind.__name__ for kind in TYPES)}, "decimal": {"Decimal"}},
    **{"collections": {"Counter", "OrderedDict", "deque"}, "fractions": {"Fraction"}, "numpy": {"asarray"}},
    **{"datetime": {"date", "datetime", "time", "timedelta", "timezone"}},
}
"""What frames may create, by module."""
HIDDEN = (types.FunctionType, types.MethodType, types.ModuleType, types.GeneratorType, types.CoroutineType, type)
"""Objects of a test whose attributes lead to what it expects: the code may only call and iterate them."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        "call": lambda target, *args, **named: target(*args, **named),
        "__instancecheck__": lambda kind, one: isinstance(one, kind),
    },
    **{function.__name__: function for function in (bool, iter, len, next, str, getattr, setattr)},
}
# With a value of the other process they give an object, if anything: one whose difference from every number is 0, or
# that is less than each, would pass for any answer.
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge")


class Proxy:
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        vars(self).update(_peer=peer, _number=number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __hash__(self) -> int:
        return hash(self._number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(self._peer.ask("__eq__", self, other))


def _operation(name: str) -> Any:
    return lambda self, *args: self._peer.ask(name, self, *args)


def _operator(name: str) -> Any:
    def apply(self: Proxy, other: Any) -> Any:
        value = self._peer.ask(name, self, other)
        return value if isinstance(value, Proxy) or isinstance(other, Proxy) else NotImplemented

    return apply


for _name in ("bool", "iter", "len", "next", "str", "setattr"):
    setattr(Proxy, f"__{_name}__", _operation(_name))
for _name in ("__instancecheck__", "__getitem__", "__setitem__", "__delitem__", "__enter__", "__exit__"):
    setattr(Proxy, _name, _operation(_name))
for _name in OPERATORS:
    setattr(Proxy, f"__{_name}__", _operator(f"__{_name}__"))


def _is_value(kind: Any) -> bool:
    """Whether frames may create instances of a class."""
    return getattr(kind, "__name__", "") in VALUES.get(getattr(kind, "__module__", ""), ())


def _is_open(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the code may do this to an object of the test: call, iterate, and read public attributes of instances."""
    if name == "getattr":
        return not isinstance(args[0], HIDDEN) and not args[1].startswith("_")
    return name in ("call", "iter", "next")


class Peer:
    """One of two processes that ask each other for results."""

    def __init__(self, read: int, write: int, is_test: bool) -> None:
        self._input, self._output, self._is_test = os.fdopen(read, "rb"), os.fdopen(write, "wb"), is_test
        self._shown: list[Any] = []
        """Objects for which the other process has proxies, by their number."""
        self._errors: dict[str, type] = {}
        """Classes of exceptions of the code, as the test has them."""

    def ask(self, name: str, *args: Any, **named: Any) -> Any:
        """The result of an operation on the first argument, in the other process, which may change the arguments."""
        self.send("ask", name, args, named)
        while (frame := self.receive())[0] == "ask":
            self.answer(*frame[1:])
        kind, value, changed, printed = frame
        sys.stdout.write(printed)
        for mine, theirs in zip((*args, *named.values()), changed, strict=True):
            if type(mine) in (list, bytearray):
                mine[:] = theirs
            elif type(mine) in (dict, set):
                mine.clear()
                mine.update(theirs)
        if kind == "error":
            raise value
        return value

    def answer(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Do what the other process asks for, and send the result with the arguments as they are then."""
        printed = io.StringIO()
        try:
            if self._is_test and not _is_open(name, args):
                raise AttributeError("the test does not show this to the code")
            function = OPERATIONS.get(name) or getattr(operator, name, None) or getattr(type(args[0]), name)
            with contextlib.nullcontext() if self._is_test else contextlib.redirect_stdout(printed):
                value, kind = function(*args, **named), "value"
        # The code may raise anything, SystemExit too.
        except BaseException as error:
            value, kind = error, "error"
        self.send(kind, value, (*args, *named.values()), printed.getvalue())

    def send(self, *frame: Any) -> None:
        """Send a frame, with numbers in place of objects that are not plain."""
        _Pickler(self, self._output).dump(frame)
        self._output.flush()

    def receive(self) -> Any:
        """The next frame of the other process. Raises EOFError after its end."""
        return _Unpickler(self, self._input).load()

    def shown(self, one: Any) -> tuple[Any, ...] | None:
        """How an object is sent; None for a value."""
        if type(one) is Proxy:
            return "yours", one._number
        if type(one) in PLAIN or _is_value(type(one)) or _is_value(one):
            return None
        if isinstance(one, types.ModuleType):
            return "module", one.__name__
        if isinstance(one, BaseException):
            return "error", *self._kinds(type(one)), one.args
        if isinstance(one, type) and issubclass(one, BaseException):
            return "class", *self._kinds(one)
        # Arrays and subclasses of plain types are reduced to values.
        if isinstance(one, (*TYPES[1:10], tuple)) or type(one).__module__ == "numpy":
            return None
        self._shown.append(one)
        return "mine", len(self._shown) - 1

    def _kinds(self, kind: type) -> tuple[str, str]:
        """The name of a class of exceptions, and that of its nearest built-in base."""
        return kind.__name__, next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")

    def object_of(self, how: str, *what: Any) -> Any:
        """The object that the other process has sent."""
        if how == "yours":
            return self._shown[what[0]]
        if how == "mine":
            return Proxy(self, what[0])
        if how == "module":
            return importlib.import_module(what[0])
        name, base = what[:2]
        kind = getattr(builtins, base)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise pickle.UnpicklingError(f"{base} is not an exception")
        if name != base:
            kind = self._errors.setdefault(name, type(name, (kind,), {}))
        return kind if how == "class" else kind(*what[2])


class _Pickler(pickle.Pickler):
    def __init__(self, peer: Peer, file: Any) -> None:
        super().__init__(file)
        self._peer = peer

    def persistent_id(self, one: Any) -> Any:
        return self._peer.shown(one)

    def reducer_override(self, one: Any) -> Any:
        if type(one).__module__ == "numpy":
            return sys.modules["numpy"].asarray, (one.tolist(),)
        base = next((kind for kind in (*TYPES, tuple) if isinstance(one, kind) and type(one) is not kind), None)
        return NotImplemented if base is None or _is_value(type(one)) else (base, (base(one),))


class _Unpickler(pickle.Unpickler):
    def __init__(self, peer: Peer, file: Any) -> None:
        super().__init__(file)
        self._peer = peer

    def persistent_load(self, name: Any) -> Any:
        return self._peer.object_of(*name)

    def find_class(self, module: str, name: str) -> Any:
        if name not in VALUES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not a value")
        return super().find_class(module, name)


def run_code(peer: Peer) -> None:
    """Run main.py, send its names, and answer until the test has ended."""
    # Where processes are open to each other, the code must not find the test in its pipe.
    peer.receive()
    with open("main.py", "rb") as file:
        code = compile(file.read(), "main.py", "exec")
    del sys.argv[1:]
    sys.orig_argv[:] = sys.argv[:]
    scope = {"__name__": "__main__", "__file__": "main.py", "__builtins__": builtins}
    # A script may end so; what it has defined is tested all the same.
    with contextlib.suppress(SystemExit):
        exec(code, scope)
    peer.send({name: value for name, value in scope.items() if not name.startswith("__")})
    while True:
        peer.answer(*peer.receive()[1:])


def run_test(peer: Peer, test: str) -> None:
    """Run the test in the names of the code. Raises what it raises."""
    peer.send("the test is read")
    (names,) = peer.receive()
    exec(compile(test, "test.py", "exec"), {**names, "__name__": "__main__"})


def main(read: str, write: str, given: str = "") -> None:
    peer, status = Peer(int(read), int(write), bool(given)), 1
    try:
        if given:
            with os.fdopen(int(given)) as file:
                test = file.read()
            run_test(peer, test)
            status = 0
        else:
            run_code(peer)
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
