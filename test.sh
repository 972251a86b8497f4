#!/usr/bin/env bash
# Runs every test of the workspace; says what is missing first. Arguments go to cargo test.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v cargo >/dev/null; then
  echo "cargo is missing: install Rust 1.95 or newer from https://rustup.rs" >&2
  exit 1
fi
if ! command -v cc >/dev/null; then
  echo "a C compiler is missing: install gcc or clang (Debian: apt-get install build-essential)" >&2
  exit 1
fi
if ! command -v "${CHROME:-chromium}" chromium-browser google-chrome google-chrome-stable chrome >/dev/null; then
  echo "no Chromium: the test that drives the report in a browser is skipped (Debian: apt-get install chromium)" >&2
fi
exec cargo test --workspace --locked "$@"
