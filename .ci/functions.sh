# Functions for the scripts in this folder, which source it in the root of the checkout.

# Prints the absolute path of a Python, which may be a name on the PATH. Links are kept: the target is not in the environment.
path_of_python() {
  local found
  found=$(command -v "$1") && echo "$(cd "$(dirname "$found")" && pwd)/$(basename "$found")"
}

# Copies all files that git tracks or would track to a folder, with modification times, so that files that were compiled
# there are not compiled again.
copy_checkout() {
  mkdir -p "$1"
  find "$1" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
  done | xargs -0 cp --parents --preserve=timestamps --target-directory "$1"
}
