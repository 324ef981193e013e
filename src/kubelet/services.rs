//! Several gRPC services on one socket: the path of a call selects the service.
//!
//! tonic's router is axum's, made for paths of any form. Here two names are compared.

use crate::telemetry::metrics;
use hyper::body::Frame;
use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{self, BoxFuture, Bytes, Service};
use tonic::server::NamedService;

/// The limit of the bytes of all requests in flight: two of the largest (`api`), and many small
/// ones.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// The bytes of all requests in flight, on all sockets.
static IN_FLIGHT_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The bytes of one request, until it is answered.
struct RequestBytes {
    own: AtomicUsize,
    all: &'static AtomicUsize,
}

impl RequestBytes {
    /// A request without bytes so far; `all` counts the bytes of all requests.
    fn among(all: &'static AtomicUsize) -> Self {
        RequestBytes { own: AtomicUsize::new(0), all }
    }

    /// Adds bytes, unless all requests in flight are too large together.
    fn add(&self, bytes: usize) -> Result<(), Status> {
        self.own.fetch_add(bytes, Ordering::Relaxed);
        if self.all.fetch_add(bytes, Ordering::Relaxed) + bytes <= IN_FLIGHT_BYTES_MAX {
            return Ok(());
        }
        metrics::request_refused("plugin", "memory");
        Err(Status::resource_exhausted("the requests in flight are too large in total; try again"))
    }
}

impl Drop for RequestBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(*self.own.get_mut(), Ordering::Relaxed);
    }
}

/// A body of a request that counts its bytes.
struct CountedBody {
    body: Body,
    bytes: Arc<RequestBytes>,
}

impl codegen::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(Err(error)) = frame.data_ref().map(|data| self.bytes.add(data.len()))
        {
            return Poll::Ready(Some(Err(error)));
        }
        polled
    }
}

/// The answer of a call.
type Answer = BoxFuture<Response<Body>, Infallible>;
type Answers = Arc<dyn Fn(Request<Body>) -> Answer + Send + Sync>;

/// The services; none at first.
#[derive(Clone, Default)]
pub struct Services(Arc<[(&'static str, Answers)]>);

impl Services {
    /// These services and one more.
    #[must_use]
    pub fn and<S>(self, service: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = Answer>,
        S: NamedService + Clone + Send + Sync + 'static,
    {
        let answers: Answers = Arc::new(move |request| service.clone().call(request));
        Services(self.0.iter().cloned().chain([(S::NAME, answers)]).collect())
    }

    /// The service with this name.
    fn named(&self, name: &str) -> Option<&Answers> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, answers)| answers)
    }
}

impl fmt::Debug for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl Service<Request<Body>> for Services {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answer {
        // `/package.Service/Method`.
        let (name, _) = request
            .uri()
            .path()
            .strip_prefix('/')
            .and_then(|path| path.split_once('/'))
            .unwrap_or_default();
        match self.named(name) {
            Some(answers) => {
                let bytes = Arc::new(RequestBytes::among(&IN_FLIGHT_BYTES));
                let counted = Arc::clone(&bytes);
                let answer =
                    answers(request.map(|body| Body::new(CountedBody { body, bytes: counted })));
                Box::pin(async move {
                    let answer = answer.await;
                    drop(bytes);
                    answer
                })
            }
            None => Box::pin(std::future::ready(Ok(Status::unimplemented("").into_http()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service that answers with its name.
    #[derive(Clone)]
    struct Named<const ALPHA: bool>;

    impl NamedService for Named<true> {
        const NAME: &'static str = "deviceplugin.DevicePlugin";
    }

    impl NamedService for Named<false> {
        const NAME: &'static str = "v1beta1.DevicePlugin";
    }

    impl<const ALPHA: bool> Service<Request<Body>> for Named<ALPHA> {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = Answer;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<Body>) -> Answer {
            let answer =
                Response::builder().header("is-alpha", ALPHA.to_string()).body(Body::empty());
            Box::pin(std::future::ready(Ok(answer.unwrap())))
        }
    }

    #[test]
    fn the_bytes_of_requests_in_flight_are_limited() {
        // A counter of its own, because other tests make requests at the same time.
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let large = RequestBytes::among(&ALL);
        assert!(large.add(IN_FLIGHT_BYTES_MAX - 1).is_ok());
        let one_more = RequestBytes::among(&ALL);
        assert_eq!(one_more.add(2).unwrap_err().code(), tonic::Code::ResourceExhausted);
        drop(large);
        assert!(one_more.add(1).is_ok());
    }

    #[tokio::test]
    async fn a_call_goes_to_the_service_in_its_path_and_an_unknown_one_is_unimplemented() {
        let services = Services::default().and(Named::<true>).and(Named::<false>);
        assert_eq!(
            format!("{services:?}"),
            r#"["deviceplugin.DevicePlugin", "v1beta1.DevicePlugin"]"#
        );
        for (path, header, expected_value) in [
            ("/v1beta1.DevicePlugin/Allocate", "is-alpha", Some("false")),
            ("/deviceplugin.DevicePlugin/Allocate", "is-alpha", Some("true")),
            // 12 is UNIMPLEMENTED (gRPC's status codes).
            ("/v1beta2.DevicePlugin/Allocate", "grpc-status", Some("12")),
            ("/v1beta1.DevicePluginX/Allocate", "grpc-status", Some("12")),
            ("/v1beta1.DevicePlugin", "grpc-status", Some("12")),
            ("/", "grpc-status", Some("12")),
        ] {
            let answer = services
                .clone()
                .call(Request::builder().uri(path).body(Body::empty()).unwrap())
                .await
                .unwrap();
            assert_eq!(
                answer.headers().get(header).map(|value| value.to_str().unwrap()),
                expected_value,
                "{path}"
            );
            assert_eq!(answer.status(), 200, "{path}");
        }
    }
}
