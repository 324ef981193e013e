//! Which seeds a randomized test runs, and on which processors.

use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The runs of a test without a wish.
const USUAL: u64 = 200;

/// The value of a variable of the environment.
pub(super) fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// The seeds of a test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seeds {
    first: u64,
    end: u64,
    /// No run begins later.
    until: Option<Instant>,
}

impl Seeds {
    /// From `HOLDFAST_FIRST_SEED` on, `HOLDFAST_SEEDS` of them, or as many as begin within
    /// `HOLDFAST_MINUTES`.
    pub(super) fn wanted() -> Self {
        let minutes = number("HOLDFAST_MINUTES");
        let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
        let first = number("HOLDFAST_FIRST_SEED").unwrap_or_default();
        let usual = if until.is_some() { u64::MAX } else { USUAL };
        let count = number("HOLDFAST_SEEDS").unwrap_or(usual);
        Seeds { first, end: first.saturating_add(count), until }
    }

    /// Makes the runs on all processors, and returns their number and one sum for each processor.
    /// `add` makes the run of a seed, and adds its result to a sum.
    pub(super) fn run<S: Default + Send>(self, add: impl Fn(&mut S, u64) + Sync) -> (u64, Vec<S>) {
        let (began, next) = (Instant::now(), AtomicU64::new(self.first));
        let is_late = || self.until.is_some_and(|until| Instant::now() >= until);
        let part = || {
            let mut sum = S::default();
            while !is_late()
                && let Ok(seed) =
                    next.fetch_update(Relaxed, Relaxed, |seed| (seed < self.end).then(|| seed + 1))
            {
                add(&mut sum, seed);
            }
            sum
        };
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let sums = thread::scope(|scope| {
            let parts: Vec<_> = (0..processors).map(|_| scope.spawn(part)).collect();
            parts.into_iter().map(|part| part.join().unwrap()).collect()
        });
        let (first, next) = (self.first, next.into_inner());
        let runs = next - first;
        let each_second = runs as f64 / began.elapsed().as_secs_f64() / processors as f64;
        println!(
            "{runs} runs of the seeds from {first} to {next}, {each_second:.0} a second and processor"
        );
        (runs, sums)
    }
}
