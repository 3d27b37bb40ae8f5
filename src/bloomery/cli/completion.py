"""`bloomery completion bash|zsh|fish`: what a shell needs to complete commands, options, recipes and their fields. The
script has all words in it, so completing starts no Python."""

import argparse
import importlib

from bloomery.base import exit_codes

_BASH = """\
_bloomery() {{
  local line="" current="${{COMP_WORDS[COMP_CWORD]}}" words i
  for ((i = 1; i < COMP_CWORD; i++)); do line+="${{COMP_WORDS[i]}} "; done
  local fields="{fields}"
  case "$line" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
  [[ ${{#COMPREPLY[@]}} != 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
}}
complete -o filenames -F _bloomery bloomery"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + _BASH
_FISH = """\
function __bloomery
  set -l fields "{fields}"
  switch (string join ' ' (commandline -opc)[2..-1])' '
{cases}
  end
end
complete -c bloomery -a '(__bloomery)'"""
_CASES = {
    "bash": '    "{start}"*) words="{words}";;',
    "fish": "    case '{start}*'\n      string split -- ' ' \"{words}\"",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = 'add `eval "$(bloomery completion bash)"` to ~/.bashrc; the same with zsh; fish: `... fish | source`'
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help=text)


def run(args: argparse.Namespace) -> int:
    from bloomery.config.schema import all_fields

    case = _CASES.get(args.shell, _CASES["bash"])
    cases = [case.format(start=start, words=" ".join(words)) for start, words in _words().items()]
    script = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[args.shell]
    print(
        script.format(cases="\n".join(cases), fields=" ".join(f"{path}=" for path in all_fields() if "*" not in path))
    )
    return exit_codes.OK


def _words() -> dict[str, list[str]]:
    """What may come after the beginning of a line; the longest beginning comes first."""
    from bloomery.cli.main import COMMANDS, parser_of
    from bloomery.config.load import shipped_recipes

    found: dict[str, list[str]] = {"": [name for name in COMMANDS if " " not in name]}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        if second:
            found.setdefault(f"{first} ", []).append(second)
            found[""] += [first] * (first not in found[""])
        parser = parser_of(name, importlib.import_module(f"bloomery.cli.{COMMANDS[name][0]}"))
        places = {action.dest: action for action in parser._actions}
        words = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        words += [str(choice) for action in parser._actions for choice in action.choices or ()]
        words += shipped_recipes() if "recipe" in places else []
        words += ["$fields"] if "overrides" in places else []
        found.setdefault(f"{name} ", []).extend(words)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
