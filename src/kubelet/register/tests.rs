//! Registrations with kubelets of several versions, on real sockets and with the kubelets' own
//! messages.

use super::*;
use crate::kubelet::api::versions;
use crate::kubelet::proto::{v1alpha as alpha, v1beta1 as beta};
use crate::kubelet::services::Services;
use std::sync::{Arc, Mutex};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response};

/// The answer of a kubelet to a version, in a package that it serves.
type Answers = fn(&str) -> Result<(), Status>;

/// The registration server of a kubelet: its answers, and the versions that clients tried.
#[derive(Clone)]
struct Kubelet {
    answers: Answers,
    tried: Arc<Mutex<Vec<String>>>,
}

impl Kubelet {
    fn answer(&self, version: String) -> Result<(), Status> {
        let answer = (self.answers)(&version);
        self.tried.lock().unwrap().push(version);
        answer
    }
}

#[tonic::async_trait]
impl beta::registration_server::Registration for Kubelet {
    async fn register(
        &self,
        request: Request<beta::RegisterRequest>,
    ) -> Result<Response<beta::Empty>, Status> {
        let request = request.into_inner();
        assert!(request.options.unwrap().get_preferred_allocation_available);
        self.answer(request.version).map(|()| Response::new(beta::Empty {}))
    }
}

#[tonic::async_trait]
impl alpha::registration_server::Registration for Kubelet {
    async fn register(
        &self,
        request: Request<alpha::RegisterRequest>,
    ) -> Result<Response<alpha::Empty>, Status> {
        self.answer(request.into_inner().version).map(|()| Response::new(alpha::Empty {}))
    }
}

/// The package that a kubelet serves.
#[derive(Clone, Copy, PartialEq)]
enum Serves {
    Beta,
    Alpha,
    Neither,
}

/// Registers once with such a kubelet. Returns the result, and the versions that the kubelet
/// received.
async fn register(
    serves: Serves,
    answers: Answers,
    worked: Option<&str>,
) -> (Result<&'static str, String>, Vec<String>) {
    let kubelet = Kubelet { answers, tried: Arc::default() };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kubelet.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let services = match serves {
        Serves::Beta => Services::default()
            .and(beta::registration_server::RegistrationServer::new(kubelet.clone())),
        Serves::Alpha => Services::default()
            .and(alpha::registration_server::RegistrationServer::new(kubelet.clone())),
        Serves::Neither => Services::default(),
    };
    tokio::spawn(Server::builder().serve_with_incoming(services, incoming));
    let worked = versions().find(|version| Some(version.name()) == worked);
    let registrar = Registrar::connect(&socket).await.unwrap();
    let result = registrar
        .register(&"example.com/gpu".parse().unwrap(), ".holdfast/x.sock", false, worked)
        .await;
    let tried = kubelet.tried.lock().unwrap().clone();
    (result.map(Version::name).map_err(|error| error.to_string()), tried)
}

fn accepts(version: &str, accepted: &str, refusal: &str) -> Result<(), Status> {
    if version == accepted { Ok(()) } else { Err(Status::unknown(refusal)) }
}

fn of_1_36(version: &str) -> Result<(), Status> {
    accepts(
        version,
        "v1beta1",
        "requested API version \"v1alpha2\" is not supported by kubelet. Supported version is [\"v1beta1\"]",
    )
}

fn of_1_9(version: &str) -> Result<(), Status> {
    accepts(
        version,
        "v1alpha2",
        "requested API version \"v1alpha1\" is not supported by kubelet. Supported version is \"v1alpha2\"",
    )
}

fn of_1_8(version: &str) -> Result<(), Status> {
    accepts(version, "v1alpha1", "unsupported API version by the Kubelet registry")
}

#[tokio::test]
async fn one_attempt_finds_the_version_of_every_kubelet() {
    assert_eq!(
        register(Serves::Beta, of_1_36, None).await,
        (Ok("v1beta1"), vec!["v1beta1".to_owned()])
    );
    assert_eq!(
        register(Serves::Alpha, of_1_9, None).await,
        (Ok("v1alpha2"), vec!["v1alpha2".to_owned()])
    );
    let (version, tried) = register(Serves::Alpha, of_1_8, None).await;
    assert_eq!((version, tried.len()), (Ok("v1alpha1"), 2));
}

#[tokio::test]
async fn the_last_working_version_is_tried_first_then_the_others() {
    let (version, tried) = register(Serves::Alpha, of_1_9, Some("v1alpha1")).await;
    assert_eq!(
        (version, tried),
        (Ok("v1alpha2"), vec!["v1alpha1".to_owned(), "v1alpha2".to_owned()])
    );
    // The kubelet was upgraded: it serves the new package in place of the old one.
    assert_eq!(
        register(Serves::Beta, of_1_36, Some("v1alpha2")).await,
        (Ok("v1beta1"), vec!["v1beta1".to_owned()])
    );
    // The kubelet was downgraded.
    assert_eq!(
        register(Serves::Alpha, of_1_9, Some("v1beta1")).await,
        (Ok("v1alpha2"), vec!["v1alpha2".to_owned()])
    );
}

#[tokio::test]
async fn a_kubelet_without_a_common_version_is_quoted() {
    let (error, tried) = register(Serves::Neither, of_1_36, None).await;
    let error = error.unwrap_err();
    assert!(
        tried.is_empty() && error.contains("v1beta1: ") && error.contains("v1alpha2: "),
        "{error}"
    );
    let only_v2 = |_: &str| {
        Err(Status::unknown(
            "requested API version is not supported by kubelet. Supported version is [\"v2\"]",
        ))
    };
    let (error, tried) = register(Serves::Beta, only_v2, None).await;
    let error = error.unwrap_err();
    assert!(tried == ["v1beta1"] && error.contains("Supported version is [\"v2\"]"), "{error}");
}

#[tokio::test]
async fn a_refusal_for_another_reason_ends_the_attempt() {
    let invalid = |_: &str| Err(Status::unknown("the ResourceName \"gpu\" is invalid"));
    let (error, tried) = register(Serves::Beta, invalid, None).await;
    assert!(error.unwrap_err().ends_with("the ResourceName \"gpu\" is invalid"));
    assert_eq!(tried, ["v1beta1"]);
}
