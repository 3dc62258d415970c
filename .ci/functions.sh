# What the scripts of this folder share. Sourced by them, in the root of the checkout.

# Prints the whole path of a Python, which may be a name on the PATH. Not what it links to: that is not in the environment.
path_of_python() {
  local found
  found=$(command -v "$1") && echo "$(cd "$(dirname "$found")" && pwd)/$(basename "$found")"
}

# Makes a folder a copy of what git knows or would know, with the times of change, so that what has been compiled there
# is not compiled again.
copy_checkout() {
  mkdir -p "$1"
  find "$1" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
  done | xargs -0 cp --parents --preserve=timestamps --target-directory "$1"
}
