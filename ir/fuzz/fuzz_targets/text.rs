//! Any text is answered: with an error that names a place in it, or with regions that print as what parses to them.
#![no_main]

use dynasour_ir::text::regions;
use dynasour_ir::verify::verify;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| match regions(text) {
    Err(error) => {
        assert!(error.line >= 1 && error.column >= 1 && error.line <= text.lines().count() + 1, "{error}");
    }
    Ok(regions_) => {
        for region in &regions_ {
            let printed = region.to_string();
            if region.versions.iter().all(|v| verify(v).is_ok()) {
                let again = regions(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
                assert_eq!(again[0].versions, region.versions, "{printed}");
            }
        }
    }
});
