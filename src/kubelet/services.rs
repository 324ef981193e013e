//! Several gRPC services on one socket: a call goes to the one that its path names.
//!
//! tonic has a router for that, which is axum's and made for paths of any form. Here two names are compared.

use super::conversation::Conversation;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

/// What becomes of a call.
type Answer = BoxFuture<Response<Body>, Infallible>;
type Answers = Arc<dyn Fn(Request<Body>) -> Answer + Send + Sync>;

/// The services; none at first.
#[derive(Clone, Default)]
pub struct Services(Arc<[(&'static str, Answers)]>);

impl Services {
    /// These and one more.
    #[must_use]
    pub fn and<S>(self, service: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = Answer>,
        S: NamedService + Clone + Send + Sync + 'static,
    {
        let answers: Answers = Arc::new(move |request| service.clone().call(request));
        Services(self.0.iter().cloned().chain([(S::NAME, answers)]).collect())
    }

    /// Who answers for a service.
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
        let (name, method) = request.uri().path().strip_prefix('/').and_then(|path| path.split_once('/')).unwrap_or_default();
        // Here they still are in their order.
        if let Some(conversation) = request.extensions().get::<Conversation>() {
            conversation.called(method);
        }
        match self.named(name) {
            Some(answers) => answers(request),
            None => Box::pin(std::future::ready(Ok(Status::unimplemented("").into_http()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tells its name in place of an answer.
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
            let answer = Response::builder().header("is-alpha", ALPHA.to_string()).body(Body::empty());
            Box::pin(std::future::ready(Ok(answer.unwrap())))
        }
    }

    #[tokio::test]
    async fn a_call_goes_to_the_service_that_its_path_names_and_every_other_one_is_told_that_there_is_none() {
        let services = Services::default().and(Named::<true>).and(Named::<false>);
        assert_eq!(format!("{services:?}"), r#"["deviceplugin.DevicePlugin", "v1beta1.DevicePlugin"]"#);
        for (path, header, told) in [
            ("/v1beta1.DevicePlugin/Allocate", "is-alpha", Some("false")),
            ("/deviceplugin.DevicePlugin/Allocate", "is-alpha", Some("true")),
            // 12 is UNIMPLEMENTED (gRPC's status codes).
            ("/v1beta2.DevicePlugin/Allocate", "grpc-status", Some("12")),
            ("/v1beta1.DevicePluginX/Allocate", "grpc-status", Some("12")),
            ("/v1beta1.DevicePlugin", "grpc-status", Some("12")),
            ("/", "grpc-status", Some("12")),
        ] {
            let answer = services.clone().call(Request::builder().uri(path).body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(answer.headers().get(header).map(|value| value.to_str().unwrap()), told, "{path}");
            assert_eq!(answer.status(), 200, "{path}");
        }
    }
}
