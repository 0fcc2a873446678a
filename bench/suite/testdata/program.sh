#!/bin/sh
# This is the program in tests of the suite: it records its arguments, and runs the script
# beside the mesh file, which a test has written.
folder=$(dirname "$4")
echo "$*" >>"$folder/calls"
. "$folder/script"
