#!/bin/sh
# Stands for stagemesh: it runs the script that a test has put beside the mesh file, with
# its own arguments, and notes these.
folder=$(dirname "$4")
echo "$*" >>"$folder/asked"
. "$folder/script"
