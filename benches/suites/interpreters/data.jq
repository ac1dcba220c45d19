# An array of records: groups, sorts, paths, updates, objects as dictionaries.
(map(select(.score > 100)) | group_by(.tags[0])
 | map({key: (.[0].tags[0] // "none"),
        value: {n: length, best: (max_by(.score) | .name), total: (map(.score) | add)}})
 | from_entries) as $tags
| [($tags | to_entries | sort_by(-.value.total, .key)[:3]),
   ([paths(type == "number")] | length),
   (map(.tags[]?) | unique | length),
   ([.[] | .score |= . + 1 | del(.name) | to_entries[].value | numbers] | add),
   (reduce .[] as {$name, $score} ({}; .[$name[:2]] += $score) | [add, keys[0]])]
