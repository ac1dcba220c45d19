# The tables of docs/placement-study.md from placement.csv (as users run it, counts, best placements), placement-traces.csv
# (times with all traces kept) and placement-cost.csv (what deoptimisations cost).
# Field 1 is quoted only if it has a comma, which no program of the study has.

BEGIN { FS = "," }

FNR == 1 {
    file++
    for (i = 1; i <= NF; i++) column[$i] = i
    next
}

file == 3 {
    ns = $(column["deopt_ns"])
    policy = $(column["policy"])
    if (ns > 0) { cost_sum[policy] += log(ns); cost_count[policy]++ }
    next
}

{
    program = $1
    sub(/ --parallel=1/, "", program)
    policy = $(column["policy"])
    if (!(program in seen)) { seen[program] = 1; programs[++np] = program }
    if (!(policy in known)) { known[policy] = 1; policies[++nq] = policy }
    ratio[file, program, policy] = $(column["to_default"])
    low[file, program, policy] = $(column["to_default_low"])
    high[file, program, policy] = $(column["to_default_high"])
    native[file, program, policy] = $(column["to_native"])
    bytes[file, program, policy] = $(column["code_bytes"])
    compile[file, program, policy] = $(column["compile_ms"])
    kept[file, program, policy] = $(column["kept"])
}

file == 1 {
    executed[program, policy] = $(column["executed"])
    failed[program, policy] = $(column["failed"])
    guards[program, policy] = $(column["guards"])
    traces[program, policy] = $(column["traces"])
    separate[program, policy] = $(column["separate"])
    joined[program, policy] = $(column["joined"])
    modelled[program, policy] = $(column["modelled"])
    predicted[program, policy] = $(column["predicted"])
    compared[program, policy] = $(column["compared"])
    # The fewest guards with which any policy that assumes what `default` assumes could do.
    needed = $(column["joined"]) + $(column["executed"]) - $(column["modelled"])
    if (policy != "control-only" && (!(program in best) || needed < best[program])) best[program] = needed
}

function heading(title,    q) {
    printf "\n### %s\n\n| program |", title
    for (q = 1; q <= nq; q++) printf " %s |", policies[q]
    printf "\n| --- |"
    for (q = 1; q <= nq; q++) printf " ---: |"
    printf "\n"
}

# Geometric mean over the programs of values[program, policy].
function mean_line(values,    p, q, sum, n) {
    printf "| geometric mean |"
    for (q = 1; q <= nq; q++) {
        sum = n = 0
        for (p = 1; p <= np; p++) {
            v = values[programs[p], policies[q]]
            if (v > 0) { sum += log(v); n++ }
        }
        printf " %.3f |", n ? exp(sum / n) : 0
    }
    printf "\n"
}

# A table of values[program, policy], and their mean.
function ratios(title, values,    p, q) {
    heading(title)
    for (p = 1; p <= np; p++) {
        printf "| `%s` |", programs[p]
        for (q = 1; q <= nq; q++) printf " %.3f |", values[programs[p], policies[q]]
        printf "\n"
    }
    mean_line(values)
}

# Times of one file against `default`.
function times(title, f,    p, q, key, mark) {
    heading(title)
    for (p = 1; p <= np; p++) {
        printf "| `%s` |", programs[p]
        for (q = 1; q <= nq; q++) {
            key = f SUBSEP programs[p] SUBSEP policies[q]
            mark = (low[key] != "" && low[key] > 1) || (high[key] != "" && high[key] < 1) ? "*" : ""
            printf " %.3f%s |", ratio[key], mark
            value[programs[p], policies[q]] = ratio[key]
        }
        printf "\n"
    }
    mean_line(value)
}

END {
    for (p = 1; p <= np; p++) for (q = 1; q <= nq; q++) {
        key = programs[p] SUBSEP policies[q]
        to_best[key] = executed[key] / best[programs[p]]
        to_own[key] = separate[key] > 0 ? modelled[key] / separate[key] : 0
        to_default[key] = executed[key] / executed[programs[p], "default"]
    }
    ratios("Guards executed, against the best placement of any policy", to_best)
    ratios("Guards executed, against the best placement of the policy's own predicates, each checked by itself", to_own)

    printf "\n### Over all programs\n\n| policy | executed, M | best, M | above | best joined, M | above | covers | predicted, M | error | largest error | covers |\n"
    printf "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for (q = 1; q <= nq; q++) {
        e = s = j = m = r = c = worst = 0
        for (p = 1; p <= np; p++) {
            key = programs[p] SUBSEP policies[q]
            e += executed[key]; s += separate[key]; j += joined[key]; m += modelled[key]
            r += predicted[key]; c += compared[key]
            error = compared[key] > 0 ? predicted[key] / compared[key] - 1 : 0
            if (error * error > worst * worst) worst = error
        }
        printf "| `%s` | %.0f | %.0f | %.1f %% | %.0f | %.0f %% | %.1f %% | %.0f | %+.2f %% | %+.1f %% | %.0f %% |\n", policies[q], e / 1e6,
            s / 1e6, 100 * (m / s - 1), j / 1e6, 100 * (m / j - 1), 100 * m / e, r / 1e6, 100 * (r / c - 1), 100 * worst, 100 * c / e
    }

    ratios("Guards executed, against `default`", to_default)
    times("Time against `default`, all traces kept (an asterisk: the 95 % interval does not hold 1)", 2)

    printf "\n### As `dynasour run` does it, without --threshold (policy `default`, three rounds)\n\n| program | traces counted | traces kept | time / native | with all traces kept |\n"
    printf "| --- | ---: | ---: | ---: | ---: |\n"
    for (p = 1; p <= np; p++) {
        key = programs[p] SUBSEP "default"
        printf "| `%s` | %d | %d | %.2f | %.2f |\n", programs[p], traces[key], kept[1, key], native[1, key], native[2, key]
    }

    printf "\n### Per policy, over all programs\n\n| policy | guards / trace | failed, M | ns per deoptimisation | code KiB | compile ms | time / native |\n"
    printf "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for (q = 1; q <= nq; q++) {
        g = t = f = c = m = all = 0
        for (p = 1; p <= np; p++) {
            key = programs[p] SUBSEP policies[q]
            g += guards[key]; t += traces[key]; f += failed[key]
            c += bytes[2, key]; m += compile[2, key]
            all += log(native[2, key])
        }
        printf "| `%s` | %.2f | %.1f | %s | %.0f | %.0f | %.3f |\n", policies[q], g / t, f / 1e6,
            cost_count[policies[q]] ? sprintf("%.0f", exp(cost_sum[policies[q]] / cost_count[policies[q]])) : "-", c / 1024, m, exp(all / np)
    }
}
