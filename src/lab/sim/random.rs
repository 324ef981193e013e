//! Random numbers that a seed repeats: a failed simulation can be run again, step by step.

use std::time::Duration;

/// A generator of 64 bits of state: SplitMix64, by the constants of Steele, Lea and Flood (OOPSLA
/// 2014). Fast and well mixed; not for secrets.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `count`; 0 if `count` is below 2.
    pub fn below(&mut self, count: usize) -> usize {
        if count < 2 {
            return 0;
        }
        // The high half of the product: evenly distributed, without a division.
        let wide = u128::from(self.number()) * count as u128;
        usize::try_from(wide >> 64).unwrap_or_default()
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        // An f64 holds exactly 53 bits.
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
        let drawn = (self.number() >> 11) as f64 / (1_u64 << 53) as f64;
        drawn < probability
    }

    /// A duration from `least` to `most`.
    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let span = u64::try_from(most.saturating_sub(least).as_nanos()).unwrap_or(u64::MAX);
        let wide = u128::from(self.number()) * (u128::from(span) + 1);
        least + Duration::from_nanos(u64::try_from(wide >> 64).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_sequence_and_another_one_does_not() {
        let sequence = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| random.number()).collect::<Vec<_>>()
        };
        assert_eq!(sequence(1), sequence(1));
        assert_ne!(sequence(1), sequence(2));
    }

    #[test]
    fn choices_stay_within_their_bounds_and_reach_all_of_them() {
        let mut random = Random::new(7);
        let mut seen = [0_u32; 6];
        for _ in 0..6000 {
            seen[random.below(6)] += 1;
            let duration = random.between(Duration::from_micros(100), Duration::from_millis(50));
            assert!((Duration::from_micros(100)..=Duration::from_millis(50)).contains(&duration));
        }
        assert!(seen.iter().all(|count| (800..1200).contains(count)), "{seen:?}");
        assert_eq!((random.below(0), random.below(1)), (0, 0));
        assert!(!random.chance(0.0) && random.chance(1.0));
    }
}
