#!/bin/bash
# Jobs of a shell: stopped, sent to the background and fetched back; traps; the statuses of children
# that signals end.
set -m
sleep 30 &
kill -STOP %1; sleep 0.2; jobs
bg %1 > /dev/null; jobs
kill -TERM %1; wait %1; echo "status $?"
(sleep 0.1; echo sub; exit 3) & fg %1 > /dev/null; echo "fg $?"
sh -c 'kill -STOP $$; echo resumed; exit 4'
echo "stopped $?"; jobs; fg > /dev/null; echo "after $?"
trap 'echo int' INT; kill -INT $$
trap 'echo alarm' ALRM; (sleep 0.2; kill -ALRM $$) & wait; echo "wait $?"
timeout 0.2 sleep 5; echo "timeout $?"
{ timeout -s KILL 0.2 sh -c 'while :; do :; done'; } 2> /dev/null; echo "timeout $?"
yes | head -1; echo "${PIPESTATUS[@]}"
{ sh -c 'kill -SEGV $$'; } 2> /dev/null; echo $?
exit 9
