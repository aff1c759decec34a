#!/bin/sh
# Three shell commands that follow each other, each in a job of its own: if one fails it is tried
# again by itself, and the next one waits for it.
#
#     examples/pipeline.sh FOLDER          defines the jobs
#     tocsin worker shell                  runs them, on any machine that has the folder
#     tocsin job trigger pipeline/extract  now, rather than at 3 o'clock
set -eu

folder=${1:?which folder is to hold the files?}

tocsin job create pipeline/extract --cron '0 3 * * *' --tz Europe/Berlin --cwd "$folder" --command '
  seq 1 100 > numbers.part && mv numbers.part numbers.txt
'

tocsin job create pipeline/transform --after pipeline/extract --cwd "$folder" --command '
  awk "{ sum += \$1 } END { print sum }" numbers.txt > sum.part && mv sum.part sum.txt
'

# The token rises with every later run, so a command that was frozen cannot write over a newer one.
tocsin job create pipeline/load --after pipeline/transform --cwd "$folder" --command '
  exec 9> load.lock && flock 9
  last=$(cat loaded.token 2> /dev/null || echo 0)
  [ "$TOCSIN_FENCING_TOKEN" -ge "$last" ] || { echo "a newer attempt was here"; exit 1; }
  echo "$TOCSIN_FENCING_TOKEN" > loaded.token
  cp sum.txt loaded.txt && cat loaded.txt
'
