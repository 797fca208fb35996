#!/bin/sh
# Installs the browser that these tests drive, where that is possible; says what is missing otherwise.
set -u
command -v chromium > /dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "test-browser: chromium is not installed, and only root of a Debian system can install it"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) > /tmp/mizzen-browser.log 2>&1 ||
  { echo "test-browser: cannot install chromium"; tail -n 3 /tmp/mizzen-browser.log; }
