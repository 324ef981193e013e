//! Requests of the DRA API, and the answers of a driver.

use super::Seeds;
use super::input::Input;
use crate::domain::{ClaimHealth, ClaimRef, DraName, PreparedDevice, is_unprintable};
use crate::kubelet::dra::{Answers, Claims, plugin};
use crate::kubelet::proto::{dra_v1, dra_v1beta1};
use futures_util::FutureExt as _;
use prost::Message as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;
use tonic::Request;

/// A driver that answers as the input chooses: some claims are prepared, some fail, some get no
/// answer, and some answers are for claims that were not requested.
#[derive(Debug, Clone)]
struct Driver {
    choices: Arc<[u8]>,
    asked: Arc<Mutex<Vec<ClaimRef>>>,
}

impl Driver {
    fn answers<T>(&self, claims: Vec<ClaimRef>, value: impl Fn(&ClaimRef) -> T) -> Answers<T> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).extend(claims.iter().cloned());
        let mut answers = Vec::new();
        for (number, claim) in claims.into_iter().enumerate() {
            match self.choices.get(number).copied().unwrap_or_default() % 8 {
                4 => {}
                5 => answers.push((claim, Err(String::new()))),
                6 => answers.push((claim, Err("first\nsecond \u{1b}[1m".repeat(80)))),
                7 => {
                    let other = ClaimRef { uid: format!("{} other", claim.uid), ..claim.clone() };
                    answers
                        .extend([(claim, Ok(value(&other))), (other.clone(), Ok(value(&other)))]);
                }
                _ => {
                    let value = value(&claim);
                    answers.push((claim, Ok(value)));
                }
            }
        }
        answers
    }
}

impl Claims for Driver {
    async fn prepare(&self, claims: Vec<ClaimRef>) -> Answers<Vec<PreparedDevice>> {
        let device = |claim: &ClaimRef| PreparedDevice {
            request: "gpu".into(),
            name: DraName { pool: "n1/gpu".into(), device: format!("gpu-{}", claim.uid) },
            cdi_devices: vec![format!("k8s.holdfast.dev/claim={}", claim.uid)],
            share_id: Some("s-1".into()),
        };
        self.answers(claims, |claim| vec![device(claim)])
    }

    async fn unprepare(&self, claims: Vec<ClaimRef>) -> Answers<()> {
        self.answers(claims, |_| ())
    }

    fn health(&self) -> watch::Receiver<Arc<[ClaimHealth]>> {
        watch::channel(Arc::from([])).1
    }
}

/// Calls the service, and returns the UIDs of the request with the error of each answer.
macro_rules! call {
    ($api:ident, $request:ident, $call:ident, $service:expr, $bytes:expr) => {{
        let Ok(request) = $api::$request::decode($bytes) else { return };
        let uids: Vec<String> = request.claims.iter().map(|claim| claim.uid.clone()).collect();
        let call = $api::dra_plugin_server::DraPlugin::$call;
        let answer = call(&$service, Request::new(request)).now_or_never().expect("no wait");
        let claims = answer.ok().map(|answer| answer.into_inner().claims.into_iter());
        (uids, claims.map(|claims| claims.map(|(uid, claim)| (uid, claim.error)).collect()))
    }};
}

/// Requests of the DRA API in both versions. The first bytes choose the call and the driver's
/// answers.
pub fn dra(data: &[u8]) {
    let mut input = Input::new(data);
    let (choice, count) = (input.small(4), input.small(8));
    let choices: Arc<[u8]> = (0..count).map(|_| input.byte()).collect();
    let driver = Driver { choices, asked: Arc::default() };
    let service = plugin::Plugin(driver.clone());
    let bytes = input.rest();
    let (uids, answers): (Vec<String>, Option<BTreeMap<String, String>>) = match choice {
        0 => call!(dra_v1, NodePrepareResourcesRequest, node_prepare_resources, service, bytes),
        1 => {
            call!(dra_v1beta1, NodePrepareResourcesRequest, node_prepare_resources, service, bytes)
        }
        2 => call!(dra_v1, NodeUnprepareResourcesRequest, node_unprepare_resources, service, bytes),
        _ => call!(
            dra_v1beta1,
            NodeUnprepareResourcesRequest,
            node_unprepare_resources,
            service,
            bytes
        ),
    };
    let Some(answers) = answers else {
        assert!(uids.len() > 1024, "only a request with too many claims is refused as a whole");
        return;
    };
    let asked = driver.asked.lock().unwrap_or_else(PoisonError::into_inner);
    is_answered(&uids, &answers, &asked, &driver.choices);
}

/// One answer for each UID, and none of a claim that the driver must not see.
fn is_answered(
    uids: &[String],
    answers: &BTreeMap<String, String>,
    asked: &[ClaimRef],
    choices: &[u8],
) {
    let wanted: BTreeSet<&String> = uids.iter().collect();
    assert_eq!(answers.keys().collect::<BTreeSet<_>>(), wanted, "one answer for each UID");
    for error in answers.values() {
        assert!(error.len() <= 1024 && !error.contains(is_unprintable), "{error:?}");
    }
    for (number, claim) in asked.iter().enumerate() {
        assert_eq!(uids.iter().filter(|uid| **uid == claim.uid).count(), 1, "asked once");
        let parts = [&claim.uid, &claim.namespace, &claim.name];
        let is_path = |part: &&String| part.is_empty() || part.contains(['/', '\0']);
        assert!(!parts.iter().any(is_path), "no part leads out of a folder: {claim:?}");
        let is_error = (4..7).contains(&(choices.get(number).copied().unwrap_or_default() % 8));
        assert_eq!(!answers[&claim.uid].is_empty(), is_error, "the driver's own answer");
    }
    let refused = answers.iter().filter(|(uid, _)| asked.iter().all(|claim| claim.uid != **uid));
    for (uid, error) in refused {
        assert!(!error.is_empty(), "`{uid}` was not asked, and must not succeed");
    }
}

/// Each call in both versions.
pub(super) fn seeds() -> Seeds {
    let claim =
        |uid: &str| dra_v1::Claim { namespace: "team".into(), uid: uid.into(), name: "gpu".into() };
    let claims = || vec![claim("u-1"), claim("u-2"), claim("u-2"), claim("../u"), claim("u-3")];
    let prepare = dra_v1::NodePrepareResourcesRequest { claims: claims() }.encode_to_vec();
    let unprepare = dra_v1::NodeUnprepareResourcesRequest { claims: claims() }.encode_to_vec();
    let with = |front: &[u8], bytes: &[u8]| [front, bytes].concat();
    vec![
        ("prepare", with(&[0, 0], &prepare)),
        ("prepare-errors", with(&[0, 4, 4, 5, 6, 7], &prepare)),
        ("prepare-v1beta1", with(&[1, 1, 7], &prepare)),
        ("unprepare", with(&[2, 2, 0, 6], &unprepare)),
        ("unprepare-v1beta1", with(&[3, 1, 5], &unprepare)),
    ]
}
