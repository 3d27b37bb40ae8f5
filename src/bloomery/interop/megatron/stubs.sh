# Sourced by every bash that `import megatron --script` starts (BASH_ENV): it records programs instead of starting them.
# $__root: the temporary folder. $__given: the user's variables, as assignments. $__bash, $__mkdir: the only programs.
set -T; ulimit -f 4096 -t 20
__guard() {  # before every simple command; with extdebug, `return 1` skips it
  shopt -s extdebug; set +eu
  eval "$__given"
  PATH=$__root/none
  [[ $__stub ]] && return 0
  local __stub=1 __head=$BASH_COMMAND __word=$BASH_COMMAND __found __to __assign
  __assign='^[A-Za-z_][A-Za-z0-9_]*=([^[:space:]"'"'"']*|"[^"]*")[[:space:]]+(.+)$'
  while [[ $__word =~ $__assign ]]; do __word=${BASH_REMATCH[2]}; done
  __word=${__word%%[[:space:]]*}
  if [[ $__word == *[/\$]* && ! $__word =~ ^[A-Za-z_][A-Za-z0-9_]*[[+=] ]]; then
    eval "__word=($__word)" 2>/dev/null  # a program that is named by its path becomes a function
    [[ $__word == */* && $__word =~ ^[A-Za-z0-9_./+-]+$ ]] && ! declare -F "$__word" >/dev/null &&
      eval "function $__word { __program $__word \"\$@\"; }"
  fi
  [[ $__head == *'<<'* ]] && __head=${__head%%$'\n'*}
  [[ $__head =~ (\&?\>\>?)[[:space:]]*([^][:space:]\;\&\|\<\>\(\)[]+) ]] || return 0
  __found=("${BASH_REMATCH[@]}")
  eval "__to=${__found[2]}" 2>/dev/null
  [[ ! $__to || $__to == /dev/* || $__to == "$__root"/calls/* ]] && return 0
  case $__to in "$__root"/*) ;; /*) __to=$__root/abs$__to ;; *) __to=$PWD/$__to ;; esac
  builtin command "$__mkdir" -p "${__to%/*}" 2>/dev/null
  eval "${BASH_COMMAND/"${__found[0]}"/"${__found[1]} \"\$__to\""}"
  return 1
}
__program() {  # record it; run the shell script that it would run
  local __stub=1 at line=${__line:-${BASH_LINENO[${#BASH_LINENO[@]} - 2]}}
  printf '%s\0' "$line" "$@" > "$__root/calls/${EPOCHREALTIME:-$SECONDS}.$BASHPID.$RANDOM"
  for ((at = 1; at <= $#; at++)); do
    case ${!at##*/} in
      *.py) break ;;
      bash | sh | zsh | dash | ksh) __line=$line builtin command "$__bash" "${@:at + 1}"; return ;;
      *.sh | *.slurm | *.sbatch) [[ -f ${!at} ]] && { __line=$line builtin command "$__bash" "${@:at}"; return; } ;;
      --wrap=*) __line=$line builtin command "$__bash" -c "${!at#--wrap=}"; return ;;
    esac
  done
  case $1 in sbatch | qsub | bsub) __line=$line builtin command "$__bash" -s; return ;; esac
  ((BASH_SUBSHELL)) && printf '$(%s)\n' "${1##*/}"  # stands for the output that nobody knows
  return 0
}
command_not_found_handle() { __program "$@"; }
exec() { (($#)) || return 0; "$@"; exit; }
command() { case $1 in -v | -V) printf '%s\n' "$2" ;; -p) "${@:2}" ;; *) "$@" ;; esac; }
source() { [[ $1 == /* || ! -f $1 ]] || builtin source "$@"; }
.() { source "$@"; }
cd() { [[ $1 == /* || ! -d $1 ]] || builtin cd "$@"; }
pushd() { :; }; popd() { :; }; trap() { :; }; kill() { :; }; ulimit() { :; }; mkdir() { :; }; clear() { :; }
cat() {
  local file line
  for file in "${@:-/dev/stdin}"; do
    [[ $file == - ]] && file=/dev/stdin
    [[ -r $file ]] && while IFS= read -r line || [[ $line ]]; do printf '%s\n' "$line"; done < "$file"
  done
}
tee() { cat; }
dirname() { case $1 in */*) printf '%s\n' "${1%/*}" ;; *) echo . ;; esac; }
basename() { local name=${1##*/}; printf '%s\n' "${name%"$2"}"; }
builtin trap wait EXIT  # for what runs in the background
builtin trap '__guard' DEBUG
