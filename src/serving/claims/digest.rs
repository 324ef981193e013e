//! The identity of an allocation. A claim may be deallocated and allocated again under the same
//! UID, so the UID alone does not show that an earlier answer is still true.

use crate::domain::{AllocatedClaim, DRA_DRIVER};
use serde::Serialize;

/// An allocated device in the input.
type Device<'a> = (&'a str, &'a str, &'a str, Option<&'a str>, bool);

/// The identity of the allocation: FNV-1a with 128 bits, as 32 hexadecimal digits, of the compact
/// JSON
///
/// ```text
/// [[[request, pool, device, share or null, admin], …], [[source, [request, …], parameters], …]]
/// ```
///
/// The devices of this driver are sorted. Its configurations keep their order, because a later one
/// has precedence. `parameters` is the text in the claim. Ledgers contain this value: it must not
/// change.
#[must_use]
pub fn digest(claim: &AllocatedClaim) -> String {
    format!("{:032x}", fnv1a(input(claim).as_bytes()))
}

fn input(claim: &AllocatedClaim) -> String {
    #[derive(Serialize)]
    struct Input<'a>(Vec<Device<'a>>, Vec<(crate::domain::ConfigSource, &'a [String], &'a str)>);

    let mut devices: Vec<Device<'_>> = claim
        .devices
        .iter()
        .map(|of| {
            let (pool, device) = (of.name.pool.as_str(), of.name.device.as_str());
            (of.request.as_str(), pool, device, of.share_id.as_deref(), of.admin)
        })
        .collect();
    devices.sort_unstable();
    // Those for other drivers are refused, and never have an effect.
    let configs = claim.configs.iter().filter(|of| of.driver == DRA_DRIVER);
    let configs = configs.map(|of| (of.source, of.requests.as_slice(), of.parameters.as_str()));
    // Texts and truths always have a JSON form.
    serde_json::to_string(&Input(devices, configs.collect())).unwrap_or_default()
}

/// The hash FNV-1a with its constants for 128 bits.
fn fnv1a(bytes: &[u8]) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Allocated, ClaimRef, ConfigSource, DraName, OpaqueConfig};

    fn allocated(request: &str, device: &str) -> Allocated {
        let name = DraName { pool: "n1/gpu".into(), device: device.into() };
        Allocated { request: request.into(), name, share_id: None, admin: false }
    }

    fn claim() -> AllocatedClaim {
        let config = |source, parameters: &str| OpaqueConfig {
            driver: DRA_DRIVER.into(),
            source,
            requests: vec!["gpu".into()],
            parameters: parameters.into(),
        };
        AllocatedClaim {
            claim: ClaimRef { uid: "u".into(), namespace: "ml".into(), name: "train".into() },
            is_allocated: true,
            devices: vec![allocated("gpu/large", "gpu-b"), allocated("gpu", "gpu-a")],
            reserved_for: Vec::new(),
            configs: vec![
                config(ConfigSource::FromClass, "{\"a\":1}"),
                config(ConfigSource::FromClaim, "{}"),
            ],
            is_by_number: false,
            pod_claim: None,
            is_deleted: false,
        }
    }

    #[test]
    fn the_input_and_its_hash_stay_as_they_are() {
        assert_eq!(
            input(&claim()),
            r#"[[["gpu","n1/gpu","gpu-a",null,false],["gpu/large","n1/gpu","gpu-b",null,false]],[["FromClass",["gpu"],"{\"a\":1}"],["FromClaim",["gpu"],"{}"]]]"#
        );
        assert_eq!(digest(&claim()), "6312d4c052357879d53250f9e8b1aa58");
        // The published values for 128 bits.
        assert_eq!(fnv1a(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv1a(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn everything_about_the_allocation_counts_and_nothing_else() {
        let usual = digest(&claim());
        let same: [fn(&mut AllocatedClaim); 4] = [
            |claim| claim.devices.reverse(),
            |claim| claim.is_deleted = true,
            |claim| claim.is_by_number = true,
            |claim| claim.claim.name = "other".into(),
        ];
        for change in same {
            let mut claim = claim();
            change(&mut claim);
            assert_eq!(digest(&claim), usual);
        }
        let other: [fn(&mut AllocatedClaim); 7] = [
            |claim| claim.devices[0].request = "gpu".into(),
            |claim| claim.devices[0].name.pool = "n2/gpu".into(),
            |claim| claim.devices[0].name.device = "gpu-c".into(),
            |claim| claim.devices[0].share_id = Some("s".into()),
            |claim| claim.devices[0].admin = true,
            |claim| claim.configs.reverse(),
            |claim| claim.configs[1].parameters = "{ }".into(),
        ];
        let mut found = std::collections::BTreeSet::from([usual]);
        for change in other {
            let mut claim = claim();
            change(&mut claim);
            assert!(found.insert(digest(&claim)), "{claim:?}");
        }
    }
}
