//! Runs every target without a fuzzer: with every file of its corpus, and with damaged ones.

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

/// The files of a target's corpus.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = folder("corpus").join(target);
    let read = |name: String| (name.clone(), fs::read(folder.join(name)).unwrap());
    names(&folder).into_iter().map(read).collect()
}

#[test]
fn no_file_of_the_corpus_breaks_a_promise() {
    let broken: Vec<String> = TARGETS
        .iter()
        .flat_map(|Target { name, run, .. }| {
            let breaks = |(_, data): &(String, Vec<u8>)| catch_unwind(|| run(data)).is_err();
            let broken = corpus(name).into_iter().filter(breaks);
            broken.map(move |(file, _)| format!("{name}/{file}"))
        })
        .collect();
    assert!(broken.is_empty(), "{broken:?}; the messages are above");
}

/// With `HOLDFAST_VARIANTS` more damaged inputs, and with `HOLDFAST_FUZZ` only those of one target.
#[test]
fn no_damaged_file_of_the_corpus_breaks_a_promise() {
    let variants = std::env::var("HOLDFAST_VARIANTS").ok().and_then(|text| text.parse().ok());
    let variants: u64 = variants.unwrap_or(20);
    let only = std::env::var("HOLDFAST_FUZZ").ok();
    for Target { name, run, .. } in
        TARGETS.iter().filter(|target| only.as_ref().is_none_or(|only| only == target.name))
    {
        let corpus = corpus(name);
        for (number, (file, data)) in (1_u64..).zip(&corpus) {
            for variant in 0..variants {
                let mut random = Random(number << 32 | (variant + 1));
                let damaged = random.damaged(data, &corpus);
                if catch_unwind(|| run(&damaged)).is_err() {
                    let kept = std::env::temp_dir().join(format!("{name}-{file}-{variant}"));
                    fs::write(&kept, damaged).unwrap();
                    panic!("a variant of {name}/{file} is in {}", kept.display());
                }
            }
        }
    }
}

/// A generator of numbers (xorshift64*), the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap() % end.max(1)
    }

    /// The data with a few changes. Some of them copy from other files of the corpus.
    fn damaged(&mut self, data: &[u8], corpus: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut data = data.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(data.len() + 1);
            let end = (at + 1 + self.below(12)).min(data.len());
            match self.below(8) {
                0 => data.truncate(at),
                1 | 2 => {
                    let bit = 1 << self.below(8);
                    data.get_mut(at).into_iter().for_each(|byte| *byte ^= bit);
                }
                3 => {
                    let byte = u8::try_from(self.below(256)).unwrap();
                    data.get_mut(at).into_iter().for_each(|old| *old = byte);
                }
                4 => drop(data.drain(at..end)),
                5 => {
                    let piece = data[at..end].to_vec();
                    let to = self.below(data.len() + 1);
                    data.splice(to..to, piece);
                }
                6 => {
                    const PIECES: [&str; 10] =
                        ["\"", "{", "}", "[", "]", "\n", ",", ":", "\0", "\u{202e}"];
                    let piece = PIECES[self.below(PIECES.len())];
                    data.splice(at..at, piece.bytes());
                }
                _ => {
                    let other = &corpus[self.below(corpus.len())].1;
                    let from = self.below(other.len() + 1);
                    let until = (from + self.below(64)).min(other.len());
                    let end = if self.below(2) == 0 { at } else { end };
                    data.splice(at..end, other[from..until].iter().copied());
                }
            }
        }
        data
    }
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
            assert!(
                fs::read(&file).ok().as_ref() == Some(&data),
                "{} differs from its seed; HOLDFAST_WRITE_GOLDEN=1 writes it again",
                file.display()
            );
        }
    }
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(names(&folder("corpus")), targets);
    let programs: BTreeSet<String> = targets.iter().map(|name| format!("{name}.rs")).collect();
    assert_eq!(names(&folder("fuzz_targets")), programs);
}
