//! Fuzz target: the parser answers any text with an error that names a position in it, or with a
//! file that prints as a text which parses to the same file.
#![no_main]

use dynasour_ir::text::{file, regions};
use dynasour_ir::verify::verify;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| match file(text) {
    Err(error) => {
        let lines = 1..=text.lines().count() + 1;
        assert!(lines.contains(&error.line) && error.column >= 1, "{error}");
    }
    Ok(parsed) => {
        for region in &parsed.regions {
            let printed = region.to_string();
            if region.versions.iter().all(|v| verify(v).is_ok()) {
                let again = regions(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
                assert_eq!(again[0].versions, region.versions, "{printed}");
            }
        }
        for setup in &parsed.setups {
            let printed = setup.to_string();
            assert_eq!(file(&printed).map(|f| f.setups), Ok(vec![setup.clone()]), "{printed}");
        }
    }
});
