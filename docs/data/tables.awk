# The tables of docs/placement-study.md from placement.csv and placement-cost.csv: time against `default`, guards executed, code and compilation.
# Field 1 is quoted only if it has a comma, which no program of the study has.

BEGIN { FS = "," }

FNR == 1 {
    for (i = 1; i <= NF; i++) column[$i] = i
    next
}

# The second file: what deoptimisations cost.
FNR != NR {
    ns = $(column["deopt_ns"])
    policy = $(column["policy"])
    if (ns > 0) { cost_sum[policy] += log(ns); cost_count[policy]++ }
    next
}

{
    program = $1
    policy = $(column["policy"])
    if (!(program in seen)) { seen[program] = 1; programs[++np] = program }
    if (!(policy in known)) { known[policy] = 1; policies[++nq] = policy }
    ratio[program, policy] = $(column["to_default"])
    low[program, policy] = $(column["to_default_low"])
    high[program, policy] = $(column["to_default_high"])
    native[program, policy] = $(column["to_native"])
    executed[program, policy] = $(column["executed"])
    failed[program, policy] = $(column["failed"])
    bytes[program, policy] = $(column["code_bytes"])
    compile[program, policy] = $(column["compile_ms"])
    guards[program, policy] = $(column["guards"])
    traces[program, policy] = $(column["traces"])
}

function heading(title) {
    printf "\n%s\n\n| program |", title
    for (q = 1; q <= nq; q++) printf " %s |", policies[q]
    printf "\n| --- |"
    for (q = 1; q <= nq; q++) printf " ---: |"
    printf "\n"
}

# Geometric mean over the programs of values[program, policy] / values[program, base].
function mean_line(values, base,    p, q, sum, n) {
    printf "| geometric mean |"
    for (q = 1; q <= nq; q++) {
        sum = n = 0
        for (p = 1; p <= np; p++) {
            v = values[programs[p], policies[q]] / (base == "" ? 1 : values[programs[p], base])
            if (v > 0) { sum += log(v); n++ }
        }
        printf " %.3f |", n ? exp(sum / n) : 0
    }
    printf "\n"
}

END {
    heading("Time against `default` (an asterisk: the 95 % interval does not hold 1)")
    for (p = 1; p <= np; p++) {
        printf "| `%s` |", programs[p]
        for (q = 1; q <= nq; q++) {
            mark = low[programs[p], policies[q]] > 1 || high[programs[p], policies[q]] < 1 ? "*" : ""
            printf " %.3f%s |", ratio[programs[p], policies[q]], mark
        }
        printf "\n"
    }
    mean_line(ratio, "")

    heading("Guards executed, against `default`")
    for (p = 1; p <= np; p++) {
        printf "| `%s` |", programs[p]
        for (q = 1; q <= nq; q++) printf " %.3f |", executed[programs[p], policies[q]] / executed[programs[p], "default"]
        printf "\n"
    }
    mean_line(executed, "default")

    printf "\nPer policy, over all programs\n\n| policy | guards / trace | executed, M | failed, M | ns per deoptimisation | code KiB | compile ms | time / native |\n"
    printf "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for (q = 1; q <= nq; q++) {
        g = t = e = f = c = m = s = 0
        for (p = 1; p <= np; p++) {
            key = programs[p] SUBSEP policies[q]
            g += guards[key]; t += traces[key]; e += executed[key]; f += failed[key]
            c += bytes[key]; m += compile[key]
            s += log(native[key])
        }
        printf "| `%s` | %.2f | %.0f | %.1f | %s | %.0f | %.0f | %.3f |\n", policies[q], g / t, e / 1e6, f / 1e6,
            cost_count[policies[q]] ? sprintf("%.0f", exp(cost_sum[policies[q]] / cost_count[policies[q]])) : "-", c / 1024, m, exp(s / np)
    }
}
