#!/bin/sh
# Compare the peak memory of a training program between two commits of the current repository.
#
#     watch_the_peak.sh BASE HEAD [FLAGS of torchext dry-run] -- train.py ARGS
#
# Writes base.json, head.json and comment.markdown into the folder $OUT (default: the current one). Exits with 5 if a
# peak grew by more than $LIMIT (default: 1%), else with the exit code of the dry run of HEAD.
set -eu

base=$1 head=$2
shift 2
torchext=${TORCHEXT:-torchext}  # may be several words, such as python -m torchext
out=$(cd "${OUT:-.}" && pwd)
trees=$(mktemp -d)

clean() {
    git worktree remove --force "$trees/base" || true
    git worktree remove --force "$trees/head" || true
    rm -rf "$trees"
}
trap clean EXIT

git worktree add --quiet --detach "$trees/base" "$base"
git worktree add --quiet --detach "$trees/head" "$head"

# A base that does not fit can be compared; without a report, --compare fails below.
rm -f "$out/base.json"
(cd "$trees/base" && $torchext dry-run --quiet --json "$out/base.json" "$@") || true

cd "$trees/head"
code=0
$torchext dry-run --quiet --json "$out/head.json" --compare "$out/base.json" --fail-above "${LIMIT:-1%}" \
    --markdown "$out/comment.markdown" "$@" || code=$?
cd "$out"
exit $code
