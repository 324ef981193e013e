//! Runs every target with every file of its corpus, without a fuzzer.

use super::{TARGETS, Target};
use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(name)
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn no_file_of_the_corpus_breaks_a_promise() {
    let broken: Vec<String> = TARGETS
        .iter()
        .flat_map(|Target { name, run, .. }| {
            let folder = folder("corpus").join(name);
            names(&folder).into_iter().filter_map(move |file| {
                let data = fs::read(folder.join(&file)).unwrap();
                catch_unwind(|| run(&data)).is_err().then(|| format!("{name}/{file}"))
            })
        })
        .collect();
    assert!(broken.is_empty(), "{broken:?}; the messages are above");
}

/// With `HOLDFAST_WRITE_GOLDEN` the seeds are written.
#[test]
fn the_corpus_has_every_seed_and_each_target_its_program() {
    for Target { name, seeds, .. } in TARGETS {
        let folder = folder("corpus").join(name);
        for (seed, data) in seeds() {
            let file = folder.join(seed);
            if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&file, &data).unwrap();
            }
            assert!(fs::read(&file).ok().as_ref() == Some(&data), "{} has changed", file.display());
        }
    }
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(names(&folder("corpus")), targets);
    let programs: BTreeSet<String> = targets.iter().map(|name| format!("{name}.rs")).collect();
    assert_eq!(names(&folder("fuzz_targets")), programs);
}
