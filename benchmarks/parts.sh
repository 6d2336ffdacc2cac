# Sourced by the scripts beside it, which are made of parts: each in its own limit, none stops the others. TOTAL_S, where
# it is set, limits all of them; GRACE_S is what a part has to end after its limit. `status` is 1 where one was not done,
# `outcomes` holds name, outcome and seconds of each.
outcomes=() status=0

note() { # PART OUTCOME SECONDS
    outcomes+=("$1" "$2" "$3")
    echo "== $1: $2, $3 s"
}

run() { # PART SECONDS COMMAND...: in that time, and in what is left of all
    local part=$1 limit=$2 left=$((${TOTAL_S:-86400} - SECONDS)) began=$SECONDS outcome=done
    shift 2
    [ "$left" -ge "$limit" ] || limit=$left
    echo "== $part"
    if [ "$limit" -lt 5 ]; then
        outcome="NOT RUN: no time left"
    else
        timeout --kill-after="${GRACE_S:-40}" "$limit" "$@"
        local code=$?
        [ "$code" = 0 ] || outcome="FAILED: exit code $code"
        [ "$code" != 124 ] || outcome="LATE: stopped after $limit s"
    fi
    [ "$outcome" = done ] || status=1
    note "$part" "$outcome" $((SECONDS - began))
}
