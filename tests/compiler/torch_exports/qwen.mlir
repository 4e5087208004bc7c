module {
  func.func @main(%arg0: tensor<32x16xf32>, %arg1: tensor<16xf32>, %arg2: tensor<16xf32>, %arg3: tensor<16x16xf32>, %arg4: tensor<8x16xf32>, %arg5: tensor<8x16xf32>, %arg6: tensor<16x16xf32>, %arg7: tensor<16xf32>, %arg8: tensor<48x16xf32>, %arg9: tensor<48x16xf32>, %arg10: tensor<16x48xf32>, %arg11: tensor<2x8xi64>, %arg12: tensor<2x8xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<16xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<16xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<8x8xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<8xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<8xi64>
    %c_4 = stablehlo.constant dense<8> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<8x8xf32>
    %cst_9 = stablehlo.constant dense_resource<torch_tensor_8_2_torch.float32_1> : tensor<8x2xf32>
    %cst_10 = stablehlo.constant dense_resource<torch_tensor_8_2_torch.float32> : tensor<8x2xf32>
    %cst_11 = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %cst_12 = arith.constant dense<2> : tensor<1xi64>
    %cst_13 = arith.constant dense<16> : tensor<1xi64>
    %cst_14 = arith.constant dense<9.9999999999999995E-7> : tensor<1xf64>
    %cst_15 = arith.constant dense<2.000000e+00> : tensor<1xf64>
    %0 = "stablehlo.gather"(%arg0, %arg11) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<32x16xf32>, tensor<2x8xi64>) -> tensor<2x8x16xf32>
    %1 = stablehlo.convert %0 : tensor<2x8x16xf32>
    %2 = stablehlo.convert %1 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %3 = stablehlo.convert %cst_12 : (tensor<1xi64>) -> tensor<1xf64>
    %4 = stablehlo.reshape %3 : (tensor<1xf64>) -> tensor<f64>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f64>) -> tensor<2x8x16xf64>
    %6 = stablehlo.power %2, %5 : tensor<2x8x16xf64>
    %7 = stablehlo.reduce(%6 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %8 = stablehlo.reshape %7 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %9 = stablehlo.convert %cst_13 : (tensor<1xi64>) -> tensor<1xf64>
    %10 = stablehlo.reshape %9 : (tensor<1xf64>) -> tensor<f64>
    %11 = stablehlo.broadcast_in_dim %10, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %12 = stablehlo.divide %8, %11 : tensor<2x8x1xf64>
    %13 = stablehlo.convert %cst_14 : tensor<1xf64>
    %14 = stablehlo.reshape %13 : (tensor<1xf64>) -> tensor<f64>
    %15 = stablehlo.broadcast_in_dim %14, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %16 = stablehlo.add %12, %15 : tensor<2x8x1xf64>
    %17 = stablehlo.rsqrt %16 : tensor<2x8x1xf64>
    %18 = stablehlo.broadcast_in_dim %17, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %19 = stablehlo.multiply %2, %18 : tensor<2x8x16xf64>
    %20 = stablehlo.convert %19 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %21 = stablehlo.broadcast_in_dim %arg2, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %22 = stablehlo.multiply %20, %21 : tensor<2x8x16xf32>
    %23 = stablehlo.transpose %arg3, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %24 = stablehlo.reshape %22 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %25 = stablehlo.dot_general %24, %23, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %26 = stablehlo.reshape %25 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %27 = stablehlo.reshape %26 : (tensor<2x8x16xf32>) -> tensor<2x8x4x4xf32>
    %28 = stablehlo.transpose %arg4, dims = [1, 0] : (tensor<8x16xf32>) -> tensor<16x8xf32>
    %29 = stablehlo.dot_general %24, %28, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x8xf32>) -> tensor<16x8xf32>
    %30 = stablehlo.reshape %29 : (tensor<16x8xf32>) -> tensor<2x8x8xf32>
    %31 = stablehlo.reshape %30 : (tensor<2x8x8xf32>) -> tensor<2x8x2x4xf32>
    %32 = stablehlo.transpose %arg5, dims = [1, 0] : (tensor<8x16xf32>) -> tensor<16x8xf32>
    %33 = stablehlo.dot_general %24, %32, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x8xf32>) -> tensor<16x8xf32>
    %34 = stablehlo.reshape %33 : (tensor<16x8xf32>) -> tensor<2x8x8xf32>
    %35 = stablehlo.reshape %34 : (tensor<2x8x8xf32>) -> tensor<2x8x2x4xf32>
    %36 = stablehlo.slice %27 [0:2, 0:8, 0:4, 0:2] : (tensor<2x8x4x4xf32>) -> tensor<2x8x4x2xf32>
    %37 = stablehlo.slice %27 [0:2, 0:8, 0:4, 2:4] : (tensor<2x8x4x4xf32>) -> tensor<2x8x4x2xf32>
    %38 = stablehlo.reshape %cst_10 : (tensor<8x2xf32>) -> tensor<1x8x2xf32>
    %39 = stablehlo.reshape %38 : (tensor<1x8x2xf32>) -> tensor<1x8x1x2xf32>
    %40 = stablehlo.reshape %cst_9 : (tensor<8x2xf32>) -> tensor<1x8x2xf32>
    %41 = stablehlo.reshape %40 : (tensor<1x8x2xf32>) -> tensor<1x8x1x2xf32>
    %42 = stablehlo.broadcast_in_dim %39, dims = [0, 1, 2, 3] : (tensor<1x8x1x2xf32>) -> tensor<2x8x4x2xf32>
    %43 = stablehlo.multiply %36, %42 : tensor<2x8x4x2xf32>
    %44 = stablehlo.broadcast_in_dim %41, dims = [0, 1, 2, 3] : (tensor<1x8x1x2xf32>) -> tensor<2x8x4x2xf32>
    %45 = stablehlo.multiply %37, %44 : tensor<2x8x4x2xf32>
    %46 = stablehlo.subtract %43, %45 : tensor<2x8x4x2xf32>
    %47 = stablehlo.multiply %37, %42 : tensor<2x8x4x2xf32>
    %48 = stablehlo.multiply %36, %44 : tensor<2x8x4x2xf32>
    %49 = stablehlo.add %47, %48 : tensor<2x8x4x2xf32>
    %50 = stablehlo.concatenate %46, %49, dim = 3 : (tensor<2x8x4x2xf32>, tensor<2x8x4x2xf32>) -> tensor<2x8x4x4xf32>
    %51 = stablehlo.slice %31 [0:2, 0:8, 0:2, 0:2] : (tensor<2x8x2x4xf32>) -> tensor<2x8x2x2xf32>
    %52 = stablehlo.slice %31 [0:2, 0:8, 0:2, 2:4] : (tensor<2x8x2x4xf32>) -> tensor<2x8x2x2xf32>
    %53 = stablehlo.broadcast_in_dim %39, dims = [0, 1, 2, 3] : (tensor<1x8x1x2xf32>) -> tensor<2x8x2x2xf32>
    %54 = stablehlo.multiply %51, %53 : tensor<2x8x2x2xf32>
    %55 = stablehlo.broadcast_in_dim %41, dims = [0, 1, 2, 3] : (tensor<1x8x1x2xf32>) -> tensor<2x8x2x2xf32>
    %56 = stablehlo.multiply %52, %55 : tensor<2x8x2x2xf32>
    %57 = stablehlo.subtract %54, %56 : tensor<2x8x2x2xf32>
    %58 = stablehlo.multiply %52, %53 : tensor<2x8x2x2xf32>
    %59 = stablehlo.multiply %51, %55 : tensor<2x8x2x2xf32>
    %60 = stablehlo.add %58, %59 : tensor<2x8x2x2xf32>
    %61 = stablehlo.concatenate %57, %60, dim = 3 : (tensor<2x8x2x2xf32>, tensor<2x8x2x2xf32>) -> tensor<2x8x2x4xf32>
    %62 = stablehlo.reshape %61 : (tensor<2x8x2x4xf32>) -> tensor<2x8x2x1x4xf32>
    %63 = stablehlo.broadcast_in_dim %62, dims = [0, 1, 2, 3, 4] : (tensor<2x8x2x1x4xf32>) -> tensor<2x8x2x2x4xf32>
    %64 = stablehlo.reshape %63 : (tensor<2x8x2x2x4xf32>) -> tensor<2x8x4x4xf32>
    %65 = stablehlo.reshape %35 : (tensor<2x8x2x4xf32>) -> tensor<2x8x2x1x4xf32>
    %66 = stablehlo.broadcast_in_dim %65, dims = [0, 1, 2, 3, 4] : (tensor<2x8x2x1x4xf32>) -> tensor<2x8x2x2x4xf32>
    %67 = stablehlo.reshape %66 : (tensor<2x8x2x2x4xf32>) -> tensor<2x8x4x4xf32>
    %68 = stablehlo.transpose %50, dims = [0, 2, 1, 3] : (tensor<2x8x4x4xf32>) -> tensor<2x4x8x4xf32>
    %69 = stablehlo.transpose %64, dims = [0, 2, 1, 3] : (tensor<2x8x4x4xf32>) -> tensor<2x4x8x4xf32>
    %70 = stablehlo.transpose %67, dims = [0, 2, 1, 3] : (tensor<2x8x4x4xf32>) -> tensor<2x4x8x4xf32>
    %71 = stablehlo.transpose %69, dims = [0, 1, 3, 2] : (tensor<2x4x8x4xf32>) -> tensor<2x4x4x8xf32>
    %72 = stablehlo.reshape %68 : (tensor<2x4x8x4xf32>) -> tensor<8x8x4xf32>
    %73 = stablehlo.reshape %71 : (tensor<2x4x4x8xf32>) -> tensor<8x4x8xf32>
    %74 = stablehlo.broadcast_in_dim %73, dims = [0, 1, 2] : (tensor<8x4x8xf32>) -> tensor<8x4x8xf32>
    %75 = stablehlo.dot_general %72, %74, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<8x8x4xf32>, tensor<8x4x8xf32>) -> tensor<8x8x8xf32>
    %76 = stablehlo.reshape %75 : (tensor<8x8x8xf32>) -> tensor<2x4x8x8xf32>
    %77 = stablehlo.convert %cst_15 : (tensor<1xf64>) -> tensor<1xf32>
    %78 = stablehlo.reshape %77 : (tensor<1xf32>) -> tensor<f32>
    %79 = stablehlo.broadcast_in_dim %78, dims = [] : (tensor<f32>) -> tensor<2x4x8x8xf32>
    %80 = stablehlo.divide %76, %79 : tensor<2x4x8x8xf32>
    %81 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %82 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %83 = stablehlo.divide %82, %81 : tensor<f64>
    %84 = stablehlo.ceil %83 : tensor<f64>
    %85 = stablehlo.convert %84 : (tensor<f64>) -> tensor<i64>
    %86 = stablehlo.reshape %85 : (tensor<i64>) -> tensor<1xi64>
    %87 = stablehlo.dynamic_iota %86, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
    %88 = stablehlo.multiply %87, %c_3 : tensor<8xi64>
    %89 = stablehlo.add %88, %c_2 : tensor<8xi64>
    %90 = stablehlo.reshape %89 : (tensor<8xi64>) -> tensor<1x8xi64>
    %91 = stablehlo.reshape %89 : (tensor<8xi64>) -> tensor<8x1xi64>
    %92 = stablehlo.broadcast_in_dim %90, dims = [0, 1] : (tensor<1x8xi64>) -> tensor<8x8xi64>
    %93 = stablehlo.broadcast_in_dim %91, dims = [0, 1] : (tensor<8x1xi64>) -> tensor<8x8xi64>
    %94 = stablehlo.subtract %92, %93 : tensor<8x8xi64>
    %95 = stablehlo.compare LE, %94, %c_1, SIGNED : (tensor<8x8xi64>, tensor<8x8xi64>) -> tensor<8x8xi1>
    %96 = stablehlo.broadcast_in_dim %95, dims = [0, 1] : (tensor<8x8xi1>) -> tensor<8x8xi1>
    %97 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %98 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %99 = stablehlo.select %96, %97, %98 : tensor<8x8xi1>, tensor<8x8xf32>
    %100 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %101 = stablehlo.broadcast_in_dim %100, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %102 = stablehlo.compare EQ, %99, %101, FLOAT : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xi1>
    %103 = stablehlo.reshape %102 : (tensor<8x8xi1>) -> tensor<1x1x8x8xi1>
    %104 = stablehlo.broadcast_in_dim %103, dims = [0, 1, 2, 3] : (tensor<1x1x8x8xi1>) -> tensor<2x4x8x8xi1>
    %105 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x4x8x8xf32>
    %106 = stablehlo.broadcast_in_dim %80, dims = [0, 1, 2, 3] : (tensor<2x4x8x8xf32>) -> tensor<2x4x8x8xf32>
    %107 = stablehlo.select %104, %105, %106 : tensor<2x4x8x8xi1>, tensor<2x4x8x8xf32>
    %108 = stablehlo.reduce(%107 init: %cst) applies stablehlo.maximum across dimensions = [3] : (tensor<2x4x8x8xf32>, tensor<f32>) -> tensor<2x4x8xf32>
    %109 = stablehlo.reshape %108 : (tensor<2x4x8xf32>) -> tensor<2x4x8x1xf32>
    %110 = stablehlo.broadcast_in_dim %109, dims = [0, 1, 2, 3] : (tensor<2x4x8x1xf32>) -> tensor<2x4x8x8xf32>
    %111 = stablehlo.subtract %107, %110 : tensor<2x4x8x8xf32>
    %112 = stablehlo.exponential %111 : tensor<2x4x8x8xf32>
    %113 = stablehlo.reduce(%112 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x4x8x8xf32>, tensor<f32>) -> tensor<2x4x8xf32>
    %114 = stablehlo.reshape %113 : (tensor<2x4x8xf32>) -> tensor<2x4x8x1xf32>
    %115 = stablehlo.broadcast_in_dim %114, dims = [0, 1, 2, 3] : (tensor<2x4x8x1xf32>) -> tensor<2x4x8x8xf32>
    %116 = stablehlo.divide %112, %115 : tensor<2x4x8x8xf32>
    %117 = stablehlo.reshape %116 : (tensor<2x4x8x8xf32>) -> tensor<8x8x8xf32>
    %118 = stablehlo.reshape %70 : (tensor<2x4x8x4xf32>) -> tensor<8x8x4xf32>
    %119 = stablehlo.broadcast_in_dim %118, dims = [0, 1, 2] : (tensor<8x8x4xf32>) -> tensor<8x8x4xf32>
    %120 = stablehlo.dot_general %117, %119, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<8x8x8xf32>, tensor<8x8x4xf32>) -> tensor<8x8x4xf32>
    %121 = stablehlo.reshape %120 : (tensor<8x8x4xf32>) -> tensor<2x4x8x4xf32>
    %122 = stablehlo.transpose %121, dims = [0, 2, 1, 3] : (tensor<2x4x8x4xf32>) -> tensor<2x8x4x4xf32>
    %123 = stablehlo.reshape %122 : (tensor<2x8x4x4xf32>) -> tensor<2x8x16xf32>
    %124 = stablehlo.transpose %arg6, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %125 = stablehlo.reshape %123 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %126 = stablehlo.dot_general %125, %124, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %127 = stablehlo.reshape %126 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %128 = stablehlo.add %1, %127 : tensor<2x8x16xf32>
    %129 = stablehlo.convert %128 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %130 = stablehlo.power %129, %5 : tensor<2x8x16xf64>
    %131 = stablehlo.reduce(%130 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %132 = stablehlo.reshape %131 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %133 = stablehlo.divide %132, %11 : tensor<2x8x1xf64>
    %134 = stablehlo.add %133, %15 : tensor<2x8x1xf64>
    %135 = stablehlo.rsqrt %134 : tensor<2x8x1xf64>
    %136 = stablehlo.broadcast_in_dim %135, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %137 = stablehlo.multiply %129, %136 : tensor<2x8x16xf64>
    %138 = stablehlo.convert %137 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %139 = stablehlo.broadcast_in_dim %arg7, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %140 = stablehlo.multiply %138, %139 : tensor<2x8x16xf32>
    %141 = stablehlo.transpose %arg8, dims = [1, 0] : (tensor<48x16xf32>) -> tensor<16x48xf32>
    %142 = stablehlo.reshape %140 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %143 = stablehlo.dot_general %142, %141, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x48xf32>) -> tensor<16x48xf32>
    %144 = stablehlo.reshape %143 : (tensor<16x48xf32>) -> tensor<2x8x48xf32>
    %145 = stablehlo.logistic %144 : tensor<2x8x48xf32>
    %146 = stablehlo.multiply %144, %145 : tensor<2x8x48xf32>
    %147 = stablehlo.transpose %arg9, dims = [1, 0] : (tensor<48x16xf32>) -> tensor<16x48xf32>
    %148 = stablehlo.dot_general %142, %147, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x48xf32>) -> tensor<16x48xf32>
    %149 = stablehlo.reshape %148 : (tensor<16x48xf32>) -> tensor<2x8x48xf32>
    %150 = stablehlo.multiply %146, %149 : tensor<2x8x48xf32>
    %151 = stablehlo.transpose %arg10, dims = [1, 0] : (tensor<16x48xf32>) -> tensor<48x16xf32>
    %152 = stablehlo.reshape %150 : (tensor<2x8x48xf32>) -> tensor<16x48xf32>
    %153 = stablehlo.dot_general %152, %151, contracting_dims = [1] x [0] : (tensor<16x48xf32>, tensor<48x16xf32>) -> tensor<16x16xf32>
    %154 = stablehlo.reshape %153 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %155 = stablehlo.add %128, %154 : tensor<2x8x16xf32>
    %156 = stablehlo.convert %155 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %157 = stablehlo.power %156, %5 : tensor<2x8x16xf64>
    %158 = stablehlo.reduce(%157 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %159 = stablehlo.reshape %158 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %160 = stablehlo.divide %159, %11 : tensor<2x8x1xf64>
    %161 = stablehlo.add %160, %15 : tensor<2x8x1xf64>
    %162 = stablehlo.rsqrt %161 : tensor<2x8x1xf64>
    %163 = stablehlo.broadcast_in_dim %162, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %164 = stablehlo.multiply %156, %163 : tensor<2x8x16xf64>
    %165 = stablehlo.convert %164 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %166 = stablehlo.broadcast_in_dim %arg1, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %167 = stablehlo.multiply %165, %166 : tensor<2x8x16xf32>
    %168 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<32x16xf32>) -> tensor<16x32xf32>
    %169 = stablehlo.reshape %167 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %170 = stablehlo.dot_general %169, %168, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x32xf32>) -> tensor<16x32xf32>
    %171 = stablehlo.reshape %170 : (tensor<16x32xf32>) -> tensor<2x8x32xf32>
    %172 = stablehlo.reshape %171 : (tensor<2x8x32xf32>) -> tensor<16x32xf32>
    %173 = stablehlo.reshape %arg12 : (tensor<2x8xi64>) -> tensor<16xi64>
    %174 = stablehlo.reduce(%172 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %175 = stablehlo.reshape %174 : (tensor<16xf32>) -> tensor<16x1xf32>
    %176 = stablehlo.broadcast_in_dim %175, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %177 = stablehlo.subtract %172, %176 : tensor<16x32xf32>
    %178 = stablehlo.exponential %177 : tensor<16x32xf32>
    %179 = stablehlo.reduce(%178 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %180 = stablehlo.reshape %179 : (tensor<16xf32>) -> tensor<16x1xf32>
    %181 = stablehlo.log %180 : tensor<16x1xf32>
    %182 = stablehlo.broadcast_in_dim %181, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %183 = stablehlo.subtract %177, %182 : tensor<16x32xf32>
    %184 = stablehlo.compare NE, %173, %c_0, SIGNED : (tensor<16xi64>, tensor<16xi64>) -> tensor<16xi1>
    %185 = stablehlo.broadcast_in_dim %184, dims = [0] : (tensor<16xi1>) -> tensor<16xi1>
    %186 = stablehlo.broadcast_in_dim %173, dims = [0] : (tensor<16xi64>) -> tensor<16xi64>
    %187 = stablehlo.select %185, %186, %c : tensor<16xi1>, tensor<16xi64>
    %188 = stablehlo.reshape %187 : (tensor<16xi64>) -> tensor<16x1xi64>
    %189 = stablehlo.iota dim = 0 : tensor<16x1x1xi64>
    %190 = stablehlo.reshape %188 : (tensor<16x1xi64>) -> tensor<16x1x1xi64>
    %191 = stablehlo.concatenate %189, %190, dim = 2 : (tensor<16x1x1xi64>, tensor<16x1x1xi64>) -> tensor<16x1x2xi64>
    %192 = "stablehlo.gather"(%183, %191) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<16x32xf32>, tensor<16x1x2xi64>) -> tensor<16x1xf32>
    %193 = stablehlo.reshape %192 : (tensor<16x1xf32>) -> tensor<16xf32>
    %194 = stablehlo.negate %193 : tensor<16xf32>
    %195 = stablehlo.broadcast_in_dim %194, dims = [0] : (tensor<16xf32>) -> tensor<16xf32>
    %196 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %197 = stablehlo.select %185, %195, %196 : tensor<16xi1>, tensor<16xf32>
    %198 = stablehlo.convert %184 : (tensor<16xi1>) -> tensor<16xi64>
    %199 = stablehlo.reduce(%198 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<16xi64>, tensor<i64>) -> tensor<i64>
    %200 = stablehlo.convert %199 : (tensor<i64>) -> tensor<f32>
    %201 = stablehlo.reduce(%197 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %202 = stablehlo.divide %201, %200 : tensor<f32>
    return %202 : tensor<f32>
  }
}

{-#
  dialect_resources: {
    builtin: {
      torch_tensor_8_2_torch.float32_1: "0x040000000000000000000000A46A573F57D6233CB7C7683F3ED4A33CC381103E1FB9F53CCFBD41BFDBCB233D107C75BFF4B64C3D8C0F8FBED19C753D4630283F323E8F3D",
      torch_tensor_8_2_torch.float32: "0x040000000000803F0000803F41510A3FB9FC7F3F3311D5BEE5F27F3F26707DBF83E27F3F305527BF94CB7F3F2C3C913E19AE7F3FB8CD753F128A7F3FBDFF403F815F7F3F"
    }
  }
#-}

