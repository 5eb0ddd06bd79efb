"""``dtx completion``: a script with which a shell completes commands, options and their values.

The script has all words, because a start of Python for each TAB would take too long.
"""

from collections.abc import Callable, Iterator
from shlex import quote
from textwrap import shorten
from typing import Final

import click

from dtx.cli.errors import Exit

_EPILOG: Final = """\b
Examples:
  dtx completion bash > ~/.local/share/bash-completion/completions/dtx
  dtx completion zsh > "${fpath[1]}/_dtx"
  dtx completion fish > ~/.config/fish/completions/dtx.fish
  source <(dtx completion bash)                 only for this shell

Write the script again after an upgrade of dtx.
"""
_ABOUT: Final = 70
"""Characters of a help text."""
_BASH: Final = """\
_dtx_words() { case $1 in
%s
*) return 1;; esac; }
_dtx() {
    local at='' each current=${COMP_WORDS[COMP_CWORD]}
    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        _dtx_words "$at/$each" > /dev/null && at=$at/$each
    done
    COMPREPLY=($(compgen -W "$(_dtx_words "$at ${COMP_WORDS[COMP_CWORD-1]}" ||
        _dtx_words "$at ${current:0:1}" || _dtx_words "$at")" -- "$current"))
}
complete -o bashdefault -o default -F _dtx dtx"""
_ZSH: Final = """\
#compdef dtx
_dtx_words() { case $1 in
%s
*) return 1;; esac; }
_dtx() {
    local at='' each current=${words[CURRENT]}
    local -a found
    for each in "${(@)words[2,CURRENT-1]}"; do
        _dtx_words "$at/$each" > /dev/null && at=$at/$each
    done
    found=("${(@f)$(_dtx_words "$at ${words[CURRENT-1]}" ||
        _dtx_words "$at ${current[1]}" || _dtx_words "$at")}")
    if [[ -n $found ]]; then _describe dtx found; else _files; fi
}
if [[ $funcstack[1] = _dtx ]]; then _dtx; else compdef _dtx dtx; fi"""
_FISH: Final = """\
function __dtx_words; switch $argv[1]
%s
case '*'; return 1; end; end
function __dtx
    set -l given (commandline -opc)
    set -l current (commandline -ct)
    set -l at ''
    for each in $given[2..-1]
        __dtx_words "$at/$each" > /dev/null; and set at "$at/$each"
    end
    set -l first (string sub -l 1 -- "$current")
    set -l found (__dtx_words "$at $given[-1]"; or __dtx_words "$at $first"; or __dtx_words "$at")
    if set -q found[1]
        string join \\n -- $found
    else
        __fish_complete_path "$current"
    end
end
complete -c dtx -f -a '(__dtx)'"""
_Words = list[tuple[str, str]]
"""Words and their help."""


def _bash(place: str, words: _Words) -> str:
    return f"{quote(place)}) echo {quote(' '.join(word for word, _ in words))};;"


def _zsh(place: str, words: _Words) -> str:
    return f"{quote(place)}) print -rl --{''.join(' ' + quote(':'.join(filter(None, each))) for each in words)};;"


def _fish(place: str, words: _Words) -> str:
    found = ("\t".join(each).replace("\\", "\\\\").replace("'", "\\'") for each in words)
    return f"case '{place}'; string join \\n -- " + " ".join(f"'{each}'" for each in found) + "; true"


_SHELLS: Final[dict[str, tuple[str, Callable[[str, _Words], str]]]] = {
    "bash": (_BASH, _bash),
    "zsh": (_ZSH, _zsh),
    "fish": (_FISH, _fish),
}
"""The script of each shell, and what makes one of its cases: the words at a place in the command line."""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the script with which a shell completes commands, options and their values."""
    root = ctx.find_root()
    script, case = _SHELLS[shell]
    click.echo(script % "\n".join(case(place, words) for place, words in _places(root.command, root, "")))
    return Exit.OK


def _places(command: click.Command, ctx: click.Context, path: str) -> Iterator[tuple[str, _Words]]:
    """The words at each place: ``/user`` is a command, ``/user -`` its options, ``/user --tag`` values of an option."""
    values: _Words = []
    options: _Words = []
    for each in command.get_params(ctx):
        choices = [(str(choice), "") for choice in each.type.choices] if isinstance(each.type, click.Choice) else []
        if not isinstance(each, click.Option):
            values += choices
        elif not each.hidden:
            flags = (*each.opts, *each.secondary_opts)
            options += [(flag, shorten(each.help or "", _ABOUT)) for flag in flags]
            if not each.is_flag and not isinstance(each.flag_value, str):
                yield from ((f"{path} {flag}", choices) for flag in flags)
    yield f"{path} -", options
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            values.append((name, inner.get_short_help_str(_ABOUT)))
            yield from _places(inner, ctx, f"{path}/{name}")
    yield path, values
